// native/core/library.cpp: dlopen and lookups.
#include "library.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "plan.h"

namespace plait {

// A file that only this process sees, in memory or, where that is not allowed, in the folder for
// temporary files. The loader knows libraries by their paths: a file in memory stays open, so that
// no other gets its path.
class Library::ImageFile {
 public:
  explicit ImageFile(std::span<const std::byte> image) {
    if (write(memfd_create("plait", MFD_CLOEXEC), image)) {
      path_ = "/proc/self/fd/" + std::to_string(file_);
      if (access(path_.c_str(), R_OK) == 0) return;
    }
    if (file_ >= 0) close(file_);
    const char* folder = std::getenv("TMPDIR");
    path_ = std::string(folder ? folder : "/tmp") + "/plait_XXXXXX";
    const bool written = write(mkostemp(path_.data(), O_CLOEXEC), image);
    on_disk_ = file_ >= 0;
    if (written) return;
    const std::string why = std::strerror(errno);
    hide();
    if (file_ >= 0) close(file_);
    throw LoadError("cannot write kernels to " + path_ + ": " + why);
  }
  ~ImageFile() {
    hide();
    close(file_);
  }
  ImageFile(const ImageFile&) = delete;
  ImageFile& operator=(const ImageFile&) = delete;
  const std::string& path() const { return path_; }
  // It was loaded: nobody needs its path any more.
  void hide() {
    if (std::exchange(on_disk_, false)) unlink(path_.c_str());
  }

 private:
  bool write(int file, std::span<const std::byte> image) {
    file_ = file;
    while (file >= 0 && !image.empty()) {
      const ssize_t n = ::write(file, image.data(), image.size());
      if (n < 0 && errno != EINTR) return false;
      image = image.subspan(static_cast<size_t>(std::max<ssize_t>(n, 0)));
    }
    return file >= 0;
  }

  std::string path_;
  int file_ = -1;
  bool on_disk_ = false;
};

Library::Library(const std::string& path, std::vector<void*> math_table)
    : path_(path), math_table_(std::move(math_table)) {
  open(path);
}

Library::Library(std::span<const std::byte> image, std::vector<void*> math_table)
    : path_("the package's kernels"),
      image_(std::make_unique<ImageFile>(image)),
      math_table_(std::move(math_table)) {
  open(image_->path());
  image_->hide();
}

void Library::open(const std::string& file) {
  handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle_) {
    const char* why = dlerror();
    throw LoadError("cannot load kernel library: " + std::string(why ? why : file));
  }
  if (void* init = dlsym(handle_, "plait_init"))
    reinterpret_cast<void (*)(void* const*)>(init)(math_table_.data());
}

Library::~Library() {
  if (handle_) dlclose(handle_);
}

void* Library::find(const char* symbol) const { return dlsym(handle_, symbol); }

KernelFn Library::kernel(const std::string& name, int32_t n_args, int32_t n_sizes) const {
  void* symbol = find(name.c_str());
  if (!symbol) throw LoadError("kernel '" + name + "' is not in " + path_);
  const auto* takes = static_cast<const int32_t*>(find((name + "_takes").c_str()));
  if (!takes) throw LoadError("kernel '" + name + "' of " + path_ + " does not say what it takes");
  if (takes[0] != n_args || takes[1] != n_sizes)
    throw LoadError("kernel '" + name + "' takes " + std::to_string(takes[0]) + " tensors and " +
                    std::to_string(takes[1]) + " sizes, the program declares " +
                    std::to_string(n_args) + " and " + std::to_string(n_sizes));
  return reinterpret_cast<KernelFn>(symbol);
}

}  // namespace plait
