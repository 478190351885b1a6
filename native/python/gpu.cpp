// native/python/gpu.cpp: launches of single GPU kernels from Python: the road of the Python target.
#include <map>
#include <tuple>

#include "python/program_object.h"

namespace plait {
namespace {
using Key = std::tuple<std::string, std::string, int>;

// Loaded once a file, kernel and device, for the rest of the process. The caller holds the GIL.
const cuda::Kernel& kernel(const char* path, const char* name, int device, size_t n_arguments) {
  static std::map<std::string, Cubins> files;
  static std::map<Key, std::unique_ptr<cuda::Kernel>> kernels;
  std::unique_ptr<cuda::Kernel>& found = kernels[{path, name, device}];
  if (!found) found = files.try_emplace(path, path).first->second.load(name, n_arguments);
  return *found;
}
}  // namespace

PyObject* module_launch_cubin(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *path = nullptr, *name = nullptr;
    int device = 0;
    PyObject *pointers = nullptr, *sizes = nullptr;
    long long grid = 0;
    if (!PyArg_ParseTuple(args, "ssiOOL", &path, &name, &device, &pointers, &sizes, &grid))
      return nullptr;
    std::vector<int64_t> values;
    for (PyObject* list : {pointers, sizes}) {
      const Items items(list, "pointers and sizes must be sequences of integers");
      for (Py_ssize_t i = 0; i < items.n; ++i) values.push_back(integer(items.data[i]));
    }
    const Accelerator gpu(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    const cuda::Stream stream = gpu.stream();
    const cuda::Kernel& k = kernel(path, name, device, values.size());
    const auto& facts = k.facts();
    if (grid <= 0) return Ref::borrow(Py_None).release();
    const c10::DataPtr global = gpu.allocate(grid * facts.num_ctas * facts.global_scratch),
                       profile = gpu.allocate(grid * facts.num_ctas * facts.profile_scratch);
    void* scratch[] = {global.get(), profile.get()};
    std::vector<void*> params;
    for (int64_t& v : values) params.push_back(&v);
    for (void*& s : scratch) params.push_back(&s);
    k.launch(stream, static_cast<uint64_t>(grid), params.data());
    return Ref::borrow(Py_None).release();
  });
}

}  // namespace plait
