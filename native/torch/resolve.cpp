// native/torch/resolve.cpp: operators of PyTorch, found and given the constant part of their stack
// when a program is loaded.
#include "extern.h"

#include <ATen/ScalarOps.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <climits>

#include "core/blaslt.h"
#include "steps.h"

namespace plait {
namespace {

using Call = ExternCall;
using c10::IValue;
using c10::TypeKind;
using Constants = std::vector<std::optional<int64_t>>;

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
    out_.has_lists = std::any_of(returns.begin(), returns.end(), [](const c10::Argument& r) {
      return r.type()->kind() == TypeKind::ListType;
    });
    if (!out_.has_lists && in_.outs.size() > returns.size()) fail("returns fewer values");
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
      case TypeKind::FloatType:
        return list(o, c10::List<double>(), [&](auto& i) { return scalar(i).toDouble(); });
      case TypeKind::BoolType:
        return list(o, c10::List<bool>(), [&](auto& i) { return scalar(i).toBool(); });
      case TypeKind::NumberType:
        return list(o, c10::impl::GenericList(c10::NumberType::get()),
                    [&](auto& i) { return IValue(scalar(i)); });
      case TypeKind::StringType:
        return list(o, c10::List<std::string>(), [](auto& i) { return i.text; });
      default: mismatch();
    }
  }
  template <class List, class Item>
  static IValue list(const Operand& o, List values, const Item& item) {
    for (const Operand& i : o.items) values.push_back(item(i));
    return IValue(std::move(values));
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
    const bool out = in_.overload == "out";
    if (!out && !in_.overload.empty()) return;
    if (in_.op == "aten::mm") take_road(Call::Road::mm, 2, out);
    if (in_.op == "aten::addmm") take_road(Call::Road::addmm, 3, out);
    if (in_.op == "aten::bmm") take_road(Call::Road::bmm, 2, out);
    if (in_.op == "aten::baddbmm") take_road(Call::Road::baddbmm, 3, out);
    if (in_.op == "aten::_addmm_activation") {
      take_road(Call::Road::addmm, 3, out);
      out_.road = Call::Road::boxed;  // the CPU's road knows no activation
      if (!out_.by_blaslt) return;
      using blaslt::Activation;
      out_.activation = out_.stack[5].toBool() ? Activation::gelu : Activation::relu;
    }
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
    out_.by_blaslt = !in_.as_eager && blaslt_library() != nullptr;
  }

  const CallExtern& in_;
  const Constants& constants_;
  Call out_;
  std::string argument_;
};

}  // namespace

ExternCall resolve_extern(const CallExtern& call, const Constants& constants) {
  try {
    return Resolver(call, constants).run();
  } catch (const c10::Error& e) {  // an operand that torch does not know, or cannot convert
    throw LoadError("operator " + call.op + ": " + e.what_without_backtrace());
  }
}

}  // namespace plait
