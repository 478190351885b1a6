// native/torch/table.cpp: the functions that generated C++ programs call (plait/wrapper.h): each is
// what the executor itself runs at that step. No exception leaves them: it is kept until the
// program has returned.
#include <bit>
#include <exception>

#include "core/functions.h"
#include "checks.h"
#include "memory.h"
#include "program.h"
#include "run.h"

namespace plait {
namespace {

struct RunningCall : plait_call {
  Frame& f;
  std::exception_ptr error;
};

// Generated code has laid out what run_tasks() reads.
static_assert(sizeof(plait_task) == sizeof(Task) && std::endian::native == std::endian::little &&
              offsetof(Task, split) == offsetof(plait_task, what) &&
              offsetof(Task, barrier) == offsetof(plait_task, what) + 1 &&
              offsetof(Task, kernel) == offsetof(plait_task, what) + 4);
static_assert(static_cast<int>(Source::Kind::size) == plait_size + 1 &&
              static_cast<int>(Source::Kind::item) == plait_item + 1);

template <class F>
int guarded(plait_call* c, F&& body) noexcept {
  auto& call = *static_cast<RunningCall*>(c);
  try {
    body(call.f, call);
    return 0;
  } catch (...) {
    call.error = std::current_exception();
    return 1;
  }
}

Extents extents(int rank, const int64_t* sizes, const int64_t* strides) {
  const auto n = static_cast<size_t>(rank);
  return {c10::IntArrayRef(sizes, n), c10::IntArrayRef(strides, n)};
}

bool is_contiguous(const Extents& e) {
  int64_t want = 1;
  for (size_t d = e.sizes.size(); d-- > 0;) {
    if (e.strides[d] != want) return false;
    want *= e.sizes[d] > 1 ? e.sizes[d] : 1;
  }
  return true;
}

}  // namespace

struct Table {
  static int64_t symbol(const plait_call* c, int32_t symbol) {
    const auto& call = *static_cast<const RunningCall*>(c);
    return call.f.value(call.f.code.symbol_exprs[static_cast<size_t>(symbol)].front());
  }
  static int read(plait_call* c, int32_t s, int what, int64_t dim, int64_t* out) {
    return guarded(c, [&](Frame& f, auto&) {
      *out = plait::read(f, s, static_cast<Source::Kind>(what + 1), dim);
    });
  }
  static int arena(plait_call* c, int32_t s, int64_t nbytes) {
    return guarded(c, [&](Frame& f, auto&) { take_arena(f, s, nbytes); });
  }
  static int place(plait_call* c, int32_t s, int64_t offset, int rank, const int64_t* sizes,
                   const int64_t* strides) {
    return guarded(c, [&](Frame& f, auto&) {
      const Extents e = extents(rank, sizes, strides);
      char* at = plait::place(f, s, offset, e);
      f.pointers[static_cast<size_t>(s)] = at;
      if (f.code.slot(s).header) bind_header(f, s, at, e);
    });
  }
  static int alloc(plait_call* c, int32_t s, int rank, const int64_t* sizes,
                   const int64_t* strides) {
    return guarded(c, [&](Frame& f, auto&) {
      const Extents e = extents(rank, sizes, strides);
      allocate(f, s, e, e.nbytes(element_size(f.code.slot(s).dtype)), is_contiguous(e));
    });
  }
  static int view(plait_call* c, int32_t s, char* first, int rank, const int64_t* sizes,
                  const int64_t* strides) {
    return guarded(c, [&](Frame& f, auto&) {
      f.pointers[static_cast<size_t>(s)] = first;
      bind_header(f, s, first, extents(rank, sizes, strides));
    });
  }
  static int storage(plait_call* c, int32_t s, char** first) {
    return guarded(c, [&](Frame& f, auto&) {
      *first = static_cast<char*>(storage_of(f, s, true).unsafeGetStorageImpl()->mutable_data());
    });
  }
  static void drop(plait_call* c, int32_t s) {
    const auto& call = *static_cast<RunningCall*>(c);
    if (call.f.code.slot(s).kind == SlotInfo::Kind::input)
      drop_input(call.f, s);
    else
      plait::drop(call.f, s);
  }
  static int failed(plait_call* c, int32_t kernel, int64_t code) {
    return guarded(c, [&](Frame& f, auto&) { fail_check(f.code, kernel, code); });
  }
  static int run(plait_call* c, const plait_task* tasks, int n, int64_t split_ns) {
    return guarded(c, [&](Frame& f, RunningCall& call) {
      run_tasks(f.code, reinterpret_cast<const Task*>(tasks), n, split_ns, call.profiled);
    });
  }
  static int launch(plait_call* c, int32_t kernel, void* const* buffers, const int64_t* sizes,
                    int64_t grid) {
    return guarded(c, [&](Frame& f, RunningCall& call) {
      const Kernel& k = f.code.plan.kernels[static_cast<size_t>(kernel)];
      c10::SmallVector<void*, 32> params;
      for (int32_t i = 0; i < k.n_args; ++i) params.push_back(const_cast<void**>(buffers + i));
      for (int32_t i = 0; i < k.n_sizes; ++i) params.push_back(const_cast<int64_t*>(sizes + i));
      for (void*& pointer : f.scratch) params.push_back(&pointer);
      run_grid(f, kernel, grid, params.data(), call.profiled);
    });
  }
  static int op(plait_call* c, int32_t index, const plait_operand* operands, int n) {
    return guarded(c, [&](Frame& f, RunningCall& call) {
      const ExternCall& e = f.code.externs[static_cast<size_t>(index)];
      TORCH_INTERNAL_ASSERT(n == e.n_given);
      call_operator(f, e, Operands(f, operands, f.code.plan.exprs.size()), call.profiled);
    });
  }
  // Calls of Python and of subprograms.
  template <auto calls, auto run_one>
  static int call(plait_call* c, int32_t index, const plait_operand* operands, int n) {
    return guarded(c, [&](Frame& f, auto&) {
      const auto& e = (f.code.*calls)[static_cast<size_t>(index)];
      TORCH_INTERNAL_ASSERT(n == e.n_given);
      run_one(f, e, Operands(f, operands, f.code.plan.exprs.size()));
    });
  }
  static constexpr auto* python = call<&Code::pythons, call_python>;
  static constexpr auto* programs = call<&Code::programs_calls, call_programs>;
  static int copy(plait_call* c, int32_t dst, int32_t src, bool bump) {
    return guarded(c, [&](Frame& f, auto&) { plait::run(f, Copy{dst, src, bump}); });
  }
  static int bump(plait_call* c, int32_t s) {
    return guarded(c, [&](Frame& f, auto&) { f.tensor(s).unsafeGetTensorImpl()->bump_version(); });
  }
  static int fill(plait_call* c, int32_t s, int kind, int64_t integer, double real,
                  double imaginary) {
    return guarded(c, [&](Frame& f, auto&) {
      f.tensor(s).fill_(kind == plait_integer ? c10::Scalar(integer)
                        : kind == plait_bool  ? c10::Scalar(integer != 0)
                        : kind == plait_real  ? c10::Scalar(real)
                                              : c10::Scalar(c10::complex<double>(real, imaginary)));
    });
  }
  static int layout(plait_call* c, int32_t s, const char* origin, bool copies, int dtype, int rank,
                    const int64_t* sizes, const int64_t* strides) {
    return guarded(c, [&](Frame& f, auto&) {
      const auto n = static_cast<size_t>(rank);
      const Layout want{static_cast<DType>(dtype), {sizes, n}, {strides, n}};
      if (!has_layout(f, s, want)) mend_layout(f, s, want, origin, copies);
    });
  }
  static int aligned(plait_call* c, int32_t s, const char* first, int64_t nbytes) {
    return guarded(c, [&](Frame& f, auto&) { check_alignment(f, s, first, nbytes); });
  }
  static int finite(plait_call* c, int32_t s, const char* origin, bool infinities) {
    return guarded(c, [&](Frame& f, auto&) { check_finite(f, s, origin, infinities); });
  }
  static int fail(plait_call* c, int error, const char* message, int64_t n_bytes,
                  const int64_t* values, int n_values) {
    return guarded(c, [&](Frame&, auto&) {
      fail_assert(static_cast<Check::Error>(error), {message, static_cast<size_t>(n_bytes)},
                  {values, static_cast<size_t>(n_values)});
    });
  }
  static int overflow(plait_call* c) {
    return guarded(c, [&](Frame&, auto&) { fail_size(); });
  }
  // What is returned was named by the plan; integers are known only now.
  static int give(plait_call* c, const plait_operand* results, int n) {
    return guarded(c, [&](Frame& f, auto&) {
      int k = 0;
      for (const Operand& o : *f.code.outputs) {
        const bool tensor = o.kind == Operand::Kind::ref || o.kind == Operand::Kind::value;
        if (!tensor && (o.kind != Operand::Kind::size ||
                        f.code.plan.exprs[static_cast<size_t>(o.id)].op == ExprNode::Op::constant))
          continue;
        TORCH_INTERNAL_ASSERT(k < n && (!tensor || results[k].value == o.id));
        if (!tensor) f.values[static_cast<size_t>(o.id)] = results[k].value;
        ++k;
      }
      TORCH_INTERNAL_ASSERT(k == n);
    });
  }

  static bool function(int64_t number, int64_t a, int64_t b, int64_t* out) {
    return size_function(number, a, b, *out);
  }

  static constexpr plait_table functions{symbol,  read,     arena, place,    alloc,  view,
                                         storage, drop,     run,   failed,   launch, op,
                                         python,  programs, copy,  bump,     fill,   layout,
                                         aligned, finite,   fail,  overflow, give,   function};
};

Generated::Generated(const std::string& path, const std::string& entry)
    : library_(std::make_shared<Library>(path, std::vector<void*>())),
      run_(reinterpret_cast<int (*)(plait_call*)>(library_->find(entry.c_str()))) {
  const auto* version = static_cast<const int32_t*>(library_->find("plait_table_version"));
  if (!version || *version != PLAIT_TABLE_VERSION)
    throw LoadError(path + " was made for another version of plait");
  if (!run_) throw LoadError("program '" + entry + "' is not in " + path);
}

void Generated::run(Frame& f, bool profiled) const {
  RunningCall call{
      {&Table::functions, f.code.functions.data(), f.pointers.data(), profiled}, f, {}};
  if (run_(&call) != 0) std::rethrow_exception(call.error);
}

}  // namespace plait
