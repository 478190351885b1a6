// native/core/library.cpp: dlopen and lookups.
#include "library.h"

#include <dlfcn.h>

#include "plan.h"

namespace plait {

Library::Library(const std::string& path, std::vector<void*> math_table)
    : path_(path), math_table_(std::move(math_table)) {
  handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle_) {
    const char* why = dlerror();
    throw LoadError("cannot load kernel library: " + std::string(why ? why : path));
  }
  if (void* init = dlsym(handle_, "plait_init"))
    reinterpret_cast<void (*)(void* const*)>(init)(math_table_.data());
}

Library::~Library() {
  if (handle_) dlclose(handle_);
}

void* Library::find(const char* symbol) const { return dlsym(handle_, symbol); }

KernelFn Library::kernel(const std::string& name) const {
  void* symbol = find(name.c_str());
  if (!symbol) throw LoadError("kernel '" + name + "' is not in " + path_);
  return reinterpret_cast<KernelFn>(symbol);
}

}  // namespace plait
