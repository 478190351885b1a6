// native/torch/extern.cpp: operators of PyTorch: resolved at load, called by the cheapest path that
// gives the same result.
//
// The general path is the dispatcher's boxed call on a stack whose constant part was built at load.
// bmm and baddbmm into existing memory call the CPU implementation directly; mm and addmm of float
// and double call the BLAS that ATen itself would call, on bare pointers: no tensor, no dispatch
// (0.3 us instead of 1.4). On a GPU products go to cuBLASLt, see blaslt.cpp.
#include <ATen/Context.h>
#include <ATen/ScalarOps.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/baddbmm_cpu_dispatch.h>
#include <ATen/ops/bmm_cpu_dispatch.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <climits>
#include <cstring>

#include "core/blaslt.h"
#include "program.h"

namespace plait {
namespace {

using Call = ExternCall;
using c10::IValue;
using c10::TypeKind;
using Constants = std::vector<std::optional<int64_t>>;

// ----------------------------------------------------------------------------------------- at load
class Resolver {
 public:
  Resolver(const CallExtern& call, const Constants& constants) : in_(call), constants_(constants) {}

  Call run() {
    if (in_.op == "plait::seed") return seed();
    out_.name = in_.overload.empty() ? in_.op : in_.op + "." + in_.overload;
    out_.builtin = in_.op.starts_with("aten::");
    out_.forks = in_.op == "streams::fork";
    out_.may_keep = in_.may_keep;
    out_.outs = in_.outs;
    out_.op = c10::Dispatcher::singleton().findSchema({in_.op, in_.overload});
    if (!out_.op)
      throw LoadError("there is no operator " + out_.name + ": load the library that defines '" +
                      in_.op.substr(0, in_.op.find(':')) + "' first");
    const c10::FunctionSchema& schema = out_.op->schema();
    const auto& args = schema.arguments();
    if (in_.args.size() > args.size()) fail("gets too many arguments");
    size_t keywords = 0;
    for (size_t pos = 0; pos < args.size(); ++pos) {
      const Operand* operand = pos < in_.args.size() ? &in_.args[pos] : nullptr;
      for (const KeywordOperand& k : in_.kwargs) {
        if (k.name != args[pos].name()) continue;
        if (operand) fail("gets argument '" + k.name + "' twice");
        operand = &k.value;
        ++keywords;
      }
      if (!operand && !args[pos].default_value())
        fail("misses argument '" + args[pos].name() + "'");
      argument_ = args[pos].name();
      const c10::AliasInfo* alias = args[pos].alias_info();
      if (operand && operand->kind == Operand::Kind::ref && alias && alias->isWrite())
        out_.written.push_back(operand->id);
      out_.stack.push_back(operand ? convert(*operand, *args[pos].type(), args[pos].N().value_or(1))
                                   : *args[pos].default_value());
    }
    if (keywords != in_.kwargs.size()) fail("gets an unknown keyword argument");
    const auto& returns = schema.returns();
    out_.returns_list = returns.size() == 1 && returns[0].type()->kind() == TypeKind::ListType;
    if (!out_.returns_list && in_.outs.size() > returns.size()) fail("returns fewer values");
    choose_road();
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw LoadError("operator " + out_.name + " " + what);
  }
  [[noreturn]] void mismatch() const {
    fail("cannot take this operand as argument '" + argument_ + "'");
  }

  // plait::seed(d) is aten::randint(2**63 - 1, [], dtype=int64, device=d): its own kernel is
  // written in Python.
  Call seed() {
    out_.name = in_.op;
    out_.outs = in_.outs;
    out_.op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::randint", "");
    const auto dtype = static_cast<int64_t>(c10::ScalarType::Long);
    const IValue none;
    if (in_.args.size() != 1 || in_.args[0].kind != Operand::Kind::device) mismatch();
    out_.stack = {IValue(INT64_MAX),
                  IValue(std::vector<int64_t>{}),
                  IValue(dtype),
                  none,
                  IValue(c10::Device(in_.args[0].text)),
                  none};
    return std::move(out_);
  }

  using FillKind = Call::Fill::Kind;
  IValue later(FillKind kind, int32_t id, std::vector<int32_t> ids = {}) {
    out_.fills.push_back({kind, static_cast<int32_t>(out_.stack.size()), id, std::move(ids)});
    return IValue();
  }
  const std::optional<int64_t>& constant(ExprId e) const {
    return constants_[static_cast<size_t>(e)];
  }

  IValue convert(const Operand& o, const c10::Type& type, int32_t repeat) {
    if (type.kind() == TypeKind::OptionalType) {
      if (o.kind == Operand::Kind::none) return IValue();
      return convert(o, *type.castRaw<c10::OptionalType>()->getElementType(), repeat);
    }
    if (type.kind() == TypeKind::ListType) {
      const c10::Type& element = *type.castRaw<c10::ListType>()->getElementType();
      if (o.kind == Operand::Kind::list) return convert_list(o, element);
      Operand repeated;
      repeated.kind = Operand::Kind::list;  // int[2] x = 3 means [3, 3]
      repeated.items.assign(static_cast<size_t>(repeat), o);
      return convert_list(repeated, element);
    }
    switch (o.kind) {
      case Operand::Kind::ref:
        return later(type.kind() == TypeKind::TensorType ? FillKind::tensor : FillKind::opaque,
                     o.id);
      case Operand::Kind::size: return convert_size(o.id, type);
      case Operand::Kind::none:  // as torch's Python binding has it
        return type.kind() == TypeKind::TensorType ? IValue(at::Tensor()) : IValue();
      case Operand::Kind::boolean: return number(c10::Scalar(o.id != 0), type);
      case Operand::Kind::real: return number(c10::Scalar(o.re), type);
      case Operand::Kind::complex:
        return number(c10::Scalar(c10::complex<double>(o.re, o.im)), type);
      case Operand::Kind::string: return IValue(o.text);
      case Operand::Kind::dtype:
        return IValue(static_cast<int64_t>(scalar_type(static_cast<DType>(o.id))));
      case Operand::Kind::device: return IValue(c10::Device(o.text));
      case Operand::Kind::layout: return IValue(static_cast<int64_t>(layout(o.text)));
      case Operand::Kind::memory_format: return IValue(static_cast<int64_t>(memory_format(o.text)));
      case Operand::Kind::value:
      case Operand::Kind::list: mismatch();
    }
    mismatch();
  }

  c10::Layout layout(const std::string& text) const {
    if (text == "strided") return c10::Layout::Strided;
    if (text == "sparse_coo") return c10::Layout::Sparse;
    if (text == "sparse_csr") return c10::Layout::SparseCsr;
    fail("knows no layout '" + text + "'");
  }
  c10::MemoryFormat memory_format(const std::string& text) const {
    if (text == "contiguous_format") return c10::MemoryFormat::Contiguous;
    if (text == "preserve_format") return c10::MemoryFormat::Preserve;
    if (text == "channels_last") return c10::MemoryFormat::ChannelsLast;
    if (text == "channels_last_3d") return c10::MemoryFormat::ChannelsLast3d;
    fail("knows no memory format '" + text + "'");
  }

  // A number for an argument of any numeric type; for a tensor argument it becomes a
  // zero-dimensional tensor that does not promote.
  IValue number(const c10::Scalar& value, const c10::Type& type) const {
    switch (type.kind()) {
      case TypeKind::NumberType: return IValue(value);
      case TypeKind::FloatType: return IValue(value.toDouble());
      case TypeKind::IntType:
      case TypeKind::SymIntType: return IValue(value.toLong());
      case TypeKind::BoolType: return IValue(value.toBool());
      case TypeKind::ComplexType: return IValue(value.toComplexDouble());
      case TypeKind::TensorType: {
        at::Tensor t = c10::scalar_to_tensor(value);
        t.unsafeGetTensorImpl()->set_wrapped_number(true);
        return IValue(t);
      }
      default: mismatch();
    }
  }
  IValue convert_size(ExprId e, const c10::Type& type) {
    if (constant(e)) return number(c10::Scalar(*constant(e)), type);
    switch (type.kind()) {
      case TypeKind::NumberType:
      case TypeKind::IntType:
      case TypeKind::SymIntType: return later(FillKind::integer, e);
      case TypeKind::FloatType: return later(FillKind::real, e);
      case TypeKind::TensorType: return later(FillKind::number_tensor, e);
      default: mismatch();
    }
  }

  IValue convert_list(const Operand& o, const c10::Type& element) {
    const bool optional = element.kind() == TypeKind::OptionalType;
    const c10::Type& inner =
        optional ? *element.castRaw<c10::OptionalType>()->getElementType() : element;
    std::vector<int32_t> ids;
    if (inner.kind() == TypeKind::TensorType) {
      for (const Operand& item : o.items) {
        if (item.kind != Operand::Kind::ref && !(optional && item.kind == Operand::Kind::none))
          mismatch();
        ids.push_back(item.kind == Operand::Kind::ref ? item.id : kNone);
      }
      return later(optional ? FillKind::optional_tensor_list : FillKind::tensor_list, kNone,
                   std::move(ids));
    }
    switch (inner.kind()) {
      case TypeKind::IntType:
      case TypeKind::SymIntType: return int_list(o);
      case TypeKind::FloatType: {
        std::vector<double> values;
        for (const Operand& item : o.items) values.push_back(scalar(item).toDouble());
        return IValue(values);
      }
      case TypeKind::BoolType: {
        c10::List<bool> values;
        for (const Operand& item : o.items) values.push_back(scalar(item).toBool());
        return IValue(values);
      }
      case TypeKind::NumberType: {
        c10::impl::GenericList values(c10::NumberType::get());
        for (const Operand& item : o.items) values.push_back(IValue(scalar(item)));
        return IValue(values);
      }
      case TypeKind::StringType: {
        c10::List<std::string> values;
        for (const Operand& item : o.items) values.push_back(item.text);
        return IValue(values);
      }
      default: mismatch();
    }
  }
  IValue int_list(const Operand& o) {
    std::vector<int32_t> ids;
    std::vector<int64_t> values;
    for (const Operand& item : o.items) {
      if (item.kind != Operand::Kind::size) mismatch();
      ids.push_back(item.id);
      if (constant(item.id)) values.push_back(*constant(item.id));
    }
    if (values.size() == ids.size()) return IValue(values);
    return later(FillKind::int_list, kNone, std::move(ids));
  }
  c10::Scalar scalar(const Operand& o) const {
    if (o.kind == Operand::Kind::real) return o.re;
    if (o.kind == Operand::Kind::boolean) return o.id != 0;
    if (o.kind == Operand::Kind::complex) return c10::complex<double>(o.re, o.im);
    if (o.kind == Operand::Kind::size && constant(o.id)) return *constant(o.id);
    mismatch();
  }

  // The operands of these operators stand at the front of their schemas, what they write at the end
  // or it is their result.
  void choose_road() {
    struct Known {
      const char* name;
      Call::Road road;
      size_t n;
      bool out;
    };
    static constexpr Known known[] = {{"aten::mm.out", Call::Road::mm, 2, true},
                                      {"aten::mm", Call::Road::mm, 2, false},
                                      {"aten::addmm.out", Call::Road::addmm, 3, true},
                                      {"aten::addmm", Call::Road::addmm, 3, false},
                                      {"aten::bmm.out", Call::Road::bmm, 2, true},
                                      {"aten::bmm", Call::Road::bmm, 2, false},
                                      {"aten::baddbmm.out", Call::Road::baddbmm, 3, true},
                                      {"aten::baddbmm", Call::Road::baddbmm, 3, false}};
    for (const Known& k : known)
      if (out_.name == k.name) take_road(k.road, k.n, k.out);
  }
  void take_road(Call::Road road, size_t n, bool out) {
    std::vector<SlotId> tensors(out_.stack.size(), kNone);
    for (const Call::Fill& f : out_.fills) {
      if (f.kind != FillKind::tensor) return;  // a scalar that is known only at the call
      tensors[static_cast<size_t>(f.pos)] = f.id;
    }
    const bool returned = !in_.outs.empty() && in_.outs[0].kind == Result::Kind::tensor;
    if (returned == out)
      return;  // an `out` operator whose result has a second name, or a result that nobody wants
    out_.tensors.assign(tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(n));
    out_.tensors.push_back(out ? tensors.back() : in_.outs[0].id);
    for (SlotId s : out_.tensors)
      if (s == kNone) fail("misses a tensor");
    if (n == 3 && (out_.stack[3].isComplexDouble() || out_.stack[4].isComplexDouble())) return;
    if (n == 3) {
      out_.beta = out_.stack[3].toScalar().toDouble();
      out_.alpha = out_.stack[4].toScalar().toDouble();
    }
    out_.road = road;
    out_.makes_result = !out;
    out_.by_blaslt = blaslt::Library::loaded() != nullptr;
  }

  const CallExtern& in_;
  const Constants& constants_;
  Call out_;
  std::string argument_;
};

// -------------------------------------------------------------------------------------------- BLAS

// The Fortran interface of the BLAS inside libtorch_cpu, the one that ATen's own matmul calls;
// null where it is not exported.
struct Blas {
  template <class T>
  using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const T*,
                        const T*, const int*, const T*, const int*, const T*, T*, const int*);
  Gemm<float> sgemm = nullptr;
  Gemm<double> dgemm = nullptr;

  Blas() {
    Dl_info info;
    if (!dladdr(reinterpret_cast<void*>(&torch_parallel_for), &info)) return;
    void* torch_cpu = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!torch_cpu) return;
    sgemm = reinterpret_cast<Gemm<float>>(dlsym(torch_cpu, "sgemm_"));
    dgemm = reinterpret_cast<Gemm<double>>(dlsym(torch_cpu, "dgemm_"));
  }
};
const Blas& blas() {
  static const Blas b;
  return b;
}

// A matrix as BLAS sees it (column-major): row-major memory is its transpose.
struct Matrix {
  char trans = 'N';
  int64_t ld = 0;
  bool usable = false;
};
Matrix row_major(int64_t rows, int64_t cols, int64_t row_stride, int64_t col_stride) {
  if ((col_stride == 1 || cols == 1) && (row_stride >= cols || rows == 1))
    return {'N', rows == 1 ? cols : row_stride, true};
  if ((row_stride == 1 || rows == 1) && (col_stride >= rows || cols == 1))
    return {'T', cols == 1 ? rows : col_stride, true};
  return {};
}

template <class T>
void gemm(Blas::Gemm<T> fn, const Matrix& a, const Matrix& b, const Matrix& c, int64_t m, int64_t n,
          int64_t k, double alpha, const void* pa, const void* pb, double beta, void* pc) {
  // C = A B in row-major memory is C' = B' A' in column-major memory.
  const int rows = static_cast<int>(n), cols = static_cast<int>(m), inner = static_cast<int>(k);
  const int lda = static_cast<int>(b.ld), ldb = static_cast<int>(a.ld),
            ldc = static_cast<int>(c.ld);
  const T scale = static_cast<T>(alpha), keep = static_cast<T>(beta);
  fn(&b.trans, &a.trans, &rows, &cols, &inner, &scale, static_cast<const T*>(pb), &lda,
     static_cast<const T*>(pa), &ldb, &keep, static_cast<T*>(pc), &ldc);
}

// Writes the addend of addmm where the product is added to it.
struct Addend {
  const char* from;
  char* to;
  int64_t row_step, to_step, row_bytes;  // in bytes; row_step 0 repeats one row
};
constexpr int64_t kParallelAddendBytes = 1 << 18;
void copy_rows(int64_t begin, int64_t end, void* context) {
  const Addend& a = *static_cast<const Addend*>(context);
  for (int64_t r = begin; r < end; ++r)
    std::memcpy(a.to + r * a.to_step, a.from + r * a.row_step, static_cast<size_t>(a.row_bytes));
}

}  // namespace

ExternCall resolve_extern(const CallExtern& call, const Constants& constants) {
  try {
    return Resolver(call, constants).run();
  } catch (const c10::Error& e) {  // an operand that torch does not know, or cannot convert
    throw LoadError("operator " + call.op + ": " + e.what_without_backtrace());
  }
}

// ------------------------------------------------------------------------------------- at the call

// What the product of two matrices needs to know, read from the sizes and strides of this call.
struct Program::Gemm {
  Matrix a, b, c;
  int64_t m, n, k;
  double beta = 0;
  Addend addend{};
};

// False where the strides, sizes or precision settings of this call want the general path.
bool Program::plan_gemm(const Frame& f, const ExternCall& c, const Operands& o, Gemm& g) const {
  const bool add = c.road == ExternCall::Road::addmm;
  const size_t first = add ? 1 : 0;
  const auto extents = [&](size_t i) {
    // What the program made is as it says, of an input only the tensor knows.
    if (!o.is_given() && slot(c.tensors[i]).kind != SlotInfo::Kind::input)
      return Extents(slot(c.tensors[i]).meta, f.values);
    const at::Tensor& t = o.tensor(c.tensors[i]);
    return Extents(t.sizes(), t.strides());
  };
  const Extents a = extents(first), b = extents(first + 1);
  if (a.sizes.size() != 2 || b.sizes.size() != 2) return false;
  g.m = a.sizes[0], g.k = a.sizes[1], g.n = b.sizes[1];
  if (g.m <= 0 || g.n <= 0 || g.k <= 0 || g.m > INT_MAX || g.n > INT_MAX || g.k > INT_MAX ||
      b.sizes[0] != g.k)
    return false;
  g.a = row_major(g.m, g.k, a.strides[0], a.strides[1]);
  g.b = row_major(g.k, g.n, b.strides[0], b.strides[1]);
  g.c = {'N', g.n, true};
  if (!c.makes_result) {
    const Extents out = extents(first + 2);
    if (out.sizes.size() != 2 || out.sizes[0] != g.m || out.sizes[1] != g.n) return false;
    g.c = row_major(g.m, g.n, out.strides[0], out.strides[1]);
  }
  if (!g.a.usable || !g.b.usable || !g.c.usable || g.c.trans != 'N' ||
      std::max({g.a.ld, g.b.ld, g.c.ld}) > INT_MAX)
    return false;
  if (c.single ? !blas().sgemm || !full_precision_ : !blas().dgemm) return false;
  if (!add || c.beta == 0) return true;
  const Extents s = extents(0);
  const size_t rank = s.sizes.size();
  if (c.beta != 1 || rank == 0 || rank > 2) return false;
  const int64_t rows = rank == 2 ? s.sizes[0] : 1;
  if (s.sizes[rank - 1] != g.n || s.strides[rank - 1] != 1 || (rows != 1 && rows != g.m))
    return false;
  const int64_t item = c.single ? 4 : 8;
  g.addend = {nullptr, nullptr, rows == 1 ? 0 : s.strides[0] * item, g.c.ld * item, g.n * item};
  g.beta = 1;
  return true;
}

bool Program::call_gemm(Frame& f, const ExternCall& c, const Operands& o) const {
  Gemm g;
  if (!plan_gemm(f, c, o, g)) return false;
  if (c.makes_result) define(f, c.tensors.back(), empty_matrix(g.m, g.n, c.single));
  const auto data = [&](size_t i) -> void* {
    if (!o.is_given()) return f.bufs[static_cast<size_t>(c.bufs) + i];
    const bool made = c.makes_result && i + 1 == c.tensors.size();
    const at::Tensor& t =
        made ? f.tensors[static_cast<size_t>(c.tensors[i])] : o.tensor(c.tensors[i]);
    return t.unsafeGetTensorImpl()->mutable_data();
  };
  const size_t first = c.road == ExternCall::Road::addmm ? 1 : 0;
  if (g.beta != 0) {
    g.addend.from = static_cast<const char*>(data(0));
    g.addend.to = static_cast<char*>(data(3));
    const int64_t rows = std::max<int64_t>(1, (kParallelAddendBytes >> 2) / g.addend.row_bytes);
    if (g.m * g.addend.row_bytes < kParallelAddendBytes ||
        torch_parallel_for(0, g.m, rows, copy_rows, &g.addend) != 0)
      copy_rows(0, g.m, &g.addend);
  }
  void *a = data(first), *b = data(first + 1), *out = data(first + 2);
  if (c.single)
    gemm(blas().sgemm, g.a, g.b, g.c, g.m, g.n, g.k, c.alpha, a, b, g.beta, out);
  else
    gemm(blas().dgemm, g.a, g.b, g.c, g.m, g.n, g.k, c.alpha, a, b, g.beta, out);
  return true;
}

void Program::call_operator(Frame& f, const ExternCall& c, const Operands& o, bool profiled) const {
  if (c.forks) {
    call_extern(f, c, o);
    if (gpu_) f.stream = gpu_->stream();
    return;
  }
  if (!profiled || c.road == ExternCall::Road::boxed) return call_extern(f, c, o);
  // The fast roads pass by the dispatcher, which records the others.
  RECORD_FUNCTION(c.op->operator_name().name, std::vector<c10::IValue>());
  call_extern(f, c, o);
}

void Program::call_extern(Frame& f, const ExternCall& c, const Operands& o) const {
  using Road = ExternCall::Road;
  if (c.bufs != kNone && call_gemm(f, c, o)) return;
  if (gpu_ && c.by_blaslt && call_blaslt(f, c, o)) return;
  // An output that is the caller's tensor (an input or constant) is not ours to hand out as a
  // mutable reference.
  if (c.road == Road::boxed || c.makes_result ||
      !f.tensors[static_cast<size_t>(o.slot(c.tensors.back()))].defined())
    call_boxed(f, c, o);
  else
    call_direct(f, c, o);
  if (!c.written.empty() && !o.is_given()) require_sizes_kept(f, c);
}

void Program::call_direct(Frame& f, const ExternCall& c, const Operands& o) const {
  using Road = ExternCall::Road;
  const auto tensor = [&](size_t i) -> const at::Tensor& { return o.tensor(c.tensors[i]); };
  at::Tensor& out = f.tensors[static_cast<size_t>(o.slot(c.tensors.back()))];
  try {
    switch (c.road) {
      case Road::mm: at::cpu::mm_out(out, tensor(0), tensor(1)); return;
      case Road::addmm:
        at::cpu::addmm_out(out, tensor(0), tensor(1), tensor(2), c.beta, c.alpha);
        return;
      case Road::bmm: at::cpu::bmm_out(out, tensor(0), tensor(1)); return;
      case Road::baddbmm:
        at::cpu::baddbmm_out(out, tensor(0), tensor(1), tensor(2), c.beta, c.alpha);
        return;
      case Road::boxed: return;
    }
  } catch (c10::Error& e) {
    e.add_context("in operator " + c.name + " of program " + plan_.name);
    throw;
  }
}

// Operators give a tensor that they write other sizes, and other memory, where theirs do not fit.
void Program::require_sizes_kept(const Frame& f, const ExternCall& c) const {
  for (SlotId s : c.written) {
    const SlotInfo& i = slots_[static_cast<size_t>(s)];
    const at::Tensor& t = *f.refs[static_cast<size_t>(s)];
    const bool made = i.kind == SlotInfo::Kind::alloc || i.kind == SlotInfo::Kind::view ||
                      i.kind == SlotInfo::Kind::place;
    const bool kept = made ? t.sizes() == Extents(i.meta, f.values).sizes
                           : !i.needs_pointer || t.unsafeGetTensorImpl()->data() ==
                                                     f.pointers[static_cast<size_t>(s)];
    if (!kept) [[unlikely]]
      throw std::runtime_error("operator " + c.name + " gave '" + i.name + "' other sizes");
  }
}

void Program::push_operands(Frame& f, const ExternCall& c, const Operands& o) const {
  using Kind = ExternCall::Fill::Kind;
  f.stack.assign(c.stack.begin(), c.stack.end());
  for (const ExternCall::Fill& fill : c.fills) {
    IValue& at = f.stack[static_cast<size_t>(fill.pos)];
    switch (fill.kind) {
      case Kind::tensor: at = IValue(o.tensor(fill.id)); break;
      case Kind::opaque: at = opaque(f, o.slot(fill.id)); break;
      case Kind::integer: at = IValue(o.value(fill.id)); break;
      case Kind::real: at = IValue(static_cast<double>(o.value(fill.id))); break;
      case Kind::number_tensor: {
        at::Tensor t = c10::scalar_to_tensor(o.value(fill.id));
        t.unsafeGetTensorImpl()->set_wrapped_number(true);
        at = IValue(std::move(t));
        break;
      }
      case Kind::tensor_list: {
        c10::List<at::Tensor> values;
        for (int32_t s : fill.ids) values.push_back(o.tensor(s));
        at = IValue(std::move(values));
        break;
      }
      case Kind::optional_tensor_list: {
        c10::List<std::optional<at::Tensor>> values;
        for (int32_t s : fill.ids)
          values.push_back(s == kNone ? std::nullopt : std::optional<at::Tensor>(o.tensor(s)));
        at = IValue(std::move(values));
        break;
      }
      case Kind::int_list: {
        std::vector<int64_t> values;
        for (int32_t e : fill.ids) values.push_back(o.value(e));
        at = IValue(std::move(values));
        break;
      }
    }
  }
}

// An input of the host's own kind (generator, float, None) as an operand; a tensor where the slot
// turned out to hold one.
c10::IValue Program::opaque(Frame& f, SlotId s) const {
  void* object = f.opaques[static_cast<size_t>(s)];
  if (!object) return IValue(*f.refs[static_cast<size_t>(s)]);
  const bool released = f.gil != nullptr;
  if (released) host_.retake_gil(std::exchange(f.gil, nullptr));
  IValue result = host_.to_ivalue(object);
  if (released) f.gil = host_.release_gil();
  return result;
}

void Program::call_boxed(Frame& f, const ExternCall& c, const Operands& o) const {
  push_operands(f, c, o);
  try {
    if (c.builtin) {
      c.op->callBoxed(&f.stack);
    } else {
      const c10::impl::ForceDispatchKeyGuard guard(outer_keys(f));
      c.op->callBoxed(&f.stack);
    }
    store_results(f, c.outs, c.returns_list);
  } catch (c10::Error& e) {
    e.add_context("in operator " + c.name + " of program " + plan_.name);
    throw;
  }
}

void Program::store_results(Frame& f, const std::vector<Result>& outs, bool is_list) const {
  if (is_list && !outs.empty()) {
    TORCH_CHECK(f.stack.size() == 1 && f.stack[0].isTensorList(),
                "the operator returned no list of tensors");
    const std::vector<at::Tensor> items = f.stack[0].toTensorVector();
    f.stack.assign(items.begin(), items.end());
  }
  TORCH_CHECK(f.stack.size() >= outs.size(), "the operator returned ", f.stack.size(), " values, ",
              outs.size(), " were expected");
  for (size_t i = 0; i < outs.size(); ++i) {
    const IValue& v = f.stack[i];
    switch (outs[i].kind) {
      case Result::Kind::dropped: break;
      case Result::Kind::tensor:
        define(f, outs[i].id, v.isNone() ? at::Tensor() : v.toTensor());
        break;
      case Result::Kind::symbol:
        set_symbol(f, outs[i].id, v.isBool() ? v.toBool() : v.toInt());
        break;
    }
  }
  f.stack.clear();
}

}  // namespace plait
