// native/python/gpu.cpp: single GPU kernels for Python, as the Python target and the tuner run
// them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "python/program_object.h"

namespace plait {
namespace {
constexpr const char* kCapsule = "plait.Cubin";

// A kernel in the context of its device. The module is unloaded when Python drops the capsule.
struct Loaded {
  Accelerator gpu;
  std::unique_ptr<cuda::Kernel> kernel;
};
}  // namespace

PyObject* module_load_cubin(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    const char *path = nullptr, *name = nullptr;
    int device = 0;
    Py_ssize_t n_arguments = 0;
    if (!PyArg_ParseTuple(args, "ssin", &path, &name, &device, &n_arguments)) return nullptr;
    const Accelerator gpu(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
    gpu.stream();  // makes sure of a context
    auto loaded = std::make_unique<Loaded>(
        Loaded{gpu, Cubins::read(path).load(name, static_cast<size_t>(n_arguments))});
    Ref capsule = Ref::check(PyCapsule_New(loaded.get(), kCapsule, [](PyObject* dropped) {
      delete static_cast<Loaded*>(PyCapsule_GetPointer(dropped, kCapsule));
    }));
    loaded.release();
    return capsule.release();
  });
}

PyObject* module_launch_cubin(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *capsule = nullptr, *pointers = nullptr, *sizes = nullptr;
    long long grid = 0;
    if (!PyArg_ParseTuple(args, "OOOL", &capsule, &pointers, &sizes, &grid)) return nullptr;
    const auto* loaded = static_cast<const Loaded*>(PyCapsule_GetPointer(capsule, kCapsule));
    if (!loaded) return nullptr;
    std::vector<int64_t> values;
    for (PyObject* list : {pointers, sizes}) {
      const Items items(list, "pointers and sizes must be sequences of integers");
      for (Py_ssize_t i = 0; i < items.n; ++i) values.push_back(integer(items.data[i]));
    }
    const cuda::Kernel& k = *loaded->kernel;
    const auto& facts = k.facts();
    if (grid <= 0) return Ref::borrow(Py_None).release();
    const Accelerator& gpu = loaded->gpu;
    const cuda::Stream stream = gpu.stream();
    const auto programs =
        static_cast<int64_t>(cuda::Grid(static_cast<uint64_t>(grid)).programs() * facts.num_ctas);
    const c10::DataPtr global = gpu.allocate(programs * facts.global_scratch),
                       profile = gpu.allocate(programs * facts.profile_scratch);
    void* scratch[] = {global.get(), profile.get()};
    std::vector<void*> params;
    for (int64_t& v : values) params.push_back(&v);
    for (void*& s : scratch) params.push_back(&s);
    if (params.size() != k.n_parameters()) throw InputError("wrong number of arguments");
    k.launch(stream, static_cast<uint64_t>(grid), params.data());
    return Ref::borrow(Py_None).release();
  });
}

PyObject* module_has_conditional_nodes(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    try {
      return PyBool_FromLong(cuda::Driver::machine().has_conditional_nodes());
    } catch (const cuda::DriverError&) {  // the machine that runs the program will know
      return Py_NewRef(Py_True);
    }
  });
}

PyObject* module_guard_for_cuda(PyObject*, PyObject* on) {
  return guarded([&]() -> PyObject* {
    static c10::impl::NoOpDeviceGuardImpl<c10::kCUDA> nothing;
    auto& slot = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kCUDA)];
    const c10::impl::DeviceGuardImplInterface* from = &nothing;
    const c10::impl::DeviceGuardImplInterface* to = nullptr;
    if (on == Py_True) std::swap(from, to);
    return PyBool_FromLong(slot.compare_exchange_strong(from, to));
  });
}

}  // namespace plait
