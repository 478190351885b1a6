// native/core/cubins.h: compiled GPU kernels in one file, as plait/runtime/cubin.py packs them.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "core/cuda.h"

namespace plait {

// The kernels of a program, by name, and texts that go with them. The images stay in memory: they
// are loaded into the context of whichever device asks.
class Cubins {
 public:
  struct Entry {
    cuda::KernelFacts facts;
    std::string image;
  };

  static Cubins read(const std::string& path);  // throws LoadError
  Cubins(const std::string& data,
         const std::string& path);  // the bytes of a file, and what errors call it

  const Entry* find(const std::string& name) const;  // null: there is none
  const std::string* text(const std::string& name) const;

  // The kernel `name` in the current context, with this many arguments. Throws LoadError if there
  // is none, DriverError if the driver refuses it.
  std::unique_ptr<cuda::Kernel> load(const std::string& name, size_t n_arguments) const;
  // The same, shared by all who ask for this image in this context, and never unloaded: a CUDA
  // graph that somebody recorded may launch it after its program is gone.
  const cuda::Kernel* share(const std::string& name, size_t n_arguments) const;

 private:
  const Entry& entry(const std::string& name) const;

  std::string path_;
  std::map<std::string, Entry> entries_;
  std::map<std::string, std::string> texts_;
};

}  // namespace plait
