// triton_launch/src/embedded.cpp: kernels compiled by the Python that runs in this process. Its
// functions are found at run time, so that nothing links libpython. What Python is asked and
// answers is what providers.cpp says.
#include <dlfcn.h>

#include "requests.h"

namespace plait::triton {
namespace {
struct Object;  // of Python
struct ThreadState;

// What of Python's C API it takes.
struct Python {
  Python() {
    find(is_initialized, "Py_IsInitialized");
    find(take, "PyGILState_Ensure");
    find(give_back, "PyGILState_Release");
    find(is_mine, "PyGILState_Check");
    find(leave, "PyEval_SaveThread");
    find(enter, "PyEval_RestoreThread");
    find(import, "PyImport_ImportModule");
    find(call, "PyObject_CallFunctionObjArgs");
    find(attribute, "PyObject_GetAttrString");
    find(bytes, "PyBytes_FromStringAndSize");
    find(read, "PyBytes_AsStringAndSize");
    find(forget, "Py_DecRef");
    find(fetch, "PyErr_Fetch");
    find(text, "PyObject_Str");
    find(utf8, "PyUnicode_AsUTF8");
  }
  static const Python& of_process(const std::string& kernel) {
    static std::mutex mutex;
    static std::unique_ptr<const Python> known;  // Python may be loaded later
    const std::scoped_lock lock(mutex);
    if (auto python = known ? nullptr : std::make_unique<const Python>();
        python && python->is_complete_)
      known = std::move(python);
    if (!known || !known->is_initialized())
      throw Error("there is no Python in this process that compiles kernels", kernel);
    return *known;
  }

  int (*is_initialized)();
  int (*take)();
  void (*give_back)(int);
  int (*is_mine)();
  ThreadState* (*leave)();
  void (*enter)(ThreadState*);
  Object* (*import)(const char*);
  Object* (*call)(Object*, ...);
  Object* (*attribute)(Object*, const char*);
  Object* (*bytes)(const char*, ptrdiff_t);
  int (*read)(Object*, char**, ptrdiff_t*);
  void (*forget)(Object*);
  void (*fetch)(Object**, Object**, Object**);
  Object* (*text)(Object*);
  const char* (*utf8)(Object*);

 private:
  template <class F>
  void find(F& entry, const char* name) {
    entry = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
    is_complete_ &= entry != nullptr;
  }
  bool is_complete_ = true;
};

// The right to call Python, for a while.
class Turn {
 public:
  explicit Turn(const Python& python) : python_(python), state_(python.take()) {}
  ~Turn() { python_.give_back(state_); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const Python& python_;
  const int state_;
};

class Embedded : public Provider {
 public:
  std::string describe(const std::string& file, const std::string& function) override {
    return ask(to_describe(file, function), function, "");
  }
  std::string evaluate(const Question& q) override { return ask(to_evaluate(q), q.function, ""); }
  Binary compile(const Request& r) override {
    return compiled(ask(to_compile(r), r.function, r.specialization));
  }

  // Who has the lock may wait for its turn in Python: nobody waits for the lock and keeps others
  // from it.
  std::unique_lock<std::mutex> hold(std::mutex& mutex) const override {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (lock) return lock;
    const Python& python = Python::of_process("(all)");
    ThreadState* mine = python.is_mine() ? python.leave() : nullptr;
    lock.lock();
    if (mine) python.enter(mine);
    return lock;
  }

 private:
  static std::string ask(const std::string& request, const std::string& kernel,
                         const std::string& specialization) {
    const Python& python = Python::of_process(kernel);
    const Turn turn(python);
    const auto forget = [&](Object* o) {
      if (o) python.forget(o);
    };
    using Owned = std::unique_ptr<Object, decltype(forget)>;
    const auto own = [&](Object* o) {
      if (o) return Owned(o, forget);
      Object *kind = nullptr, *value = nullptr, *trace = nullptr;
      python.fetch(&kind, &value, &trace);
      const Owned a(kind, forget), b(value, forget), c(trace, forget);
      const Owned said(value ? python.text(value) : nullptr, forget);
      const char* text = said ? python.utf8(said.get()) : nullptr;
      throw Error(std::string("Python in this process: ") + (text ? text : "it failed"), kernel,
                  specialization);
    };
    const Owned module = own(python.import("triton_launch.worker"));
    const Owned answer = own(python.attribute(module.get(), "answer"));
    const Owned question =
        own(python.bytes(request.data(), static_cast<ptrdiff_t>(request.size())));
    const Owned result = own(python.call(answer.get(), question.get(), nullptr));
    char* data = nullptr;
    ptrdiff_t size = 0;
    if (python.read(result.get(), &data, &size) != 0 || size == 0)
      throw Error("Python in this process gave no answer", kernel, specialization);
    return said({data, static_cast<size_t>(size)}, kernel, specialization);
  }
};
}  // namespace

std::shared_ptr<Provider> embedded() {
  static const auto made = std::make_shared<Embedded>();
  return made;
}

}  // namespace plait::triton
