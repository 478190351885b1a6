// native/torch/load.cpp: Plan -> Code. Everything that can be decided once is decided here.
#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <climits>
#include <optional>

#include "frame.h"

namespace plait {

c10::ScalarType scalar_type(DType dtype) {
  using S = c10::ScalarType;
  static constexpr S types[] = {
      S::Bool,          S::Byte,        S::UInt16,          S::UInt32,
      S::UInt64,        S::Char,        S::Short,           S::Int,
      S::Long,          S::Half,        S::BFloat16,        S::Float,
      S::Double,        S::ComplexHalf, S::ComplexFloat,    S::ComplexDouble,
      S::Float8_e4m3fn, S::Float8_e5m2, S::Float8_e4m3fnuz, S::Float8_e5m2fnuz,
      S::Float8_e8m0fnu};
  static_assert(std::size(types) == static_cast<size_t>(DType::opaque));
  if (dtype >= DType::opaque) throw LoadError("the element type 'opaque' cannot be allocated");
  return types[static_cast<size_t>(dtype)];
}

DType from_scalar_type(c10::ScalarType type) {
  for (int32_t d = 0; d < static_cast<int32_t>(DType::opaque); ++d)
    if (scalar_type(static_cast<DType>(d)) == type) return static_cast<DType>(d);
  return DType::opaque;
}

const char* torch_name(DType dtype) {
  static constexpr const char* names[] = {
      "bool",           "uint8",         "uint16",      "uint32",          "uint64",
      "int8",           "int16",         "int32",       "int64",           "float16",
      "bfloat16",       "float32",       "float64",     "complex32",       "complex64",
      "complex128",     "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
      "float8_e8m0fnu", "opaque",        "any"};
  return names[static_cast<size_t>(dtype)];
}

namespace {
// Memory that dies inside a region and is worth ending it for, if an allocation follows.
constexpr int64_t kRegionBreakBytes = 1 << 20;
constexpr int64_t kSmallRegionNs = 10'000;
}  // namespace

// Two walks over the body: the first learns what each slot is and how it is used, the second emits
// steps.
class Loader {
 public:
  explicit Loader(Code& p)
      : p_(p), plan_(p.plan), patches_(plan_.slots.size()), last_use_(plan_.slots.size(), -1) {}

  void run() {
    fold_constants();
    p_.slots.resize(plan_.slots.size());
    for (size_t s = 0; s < plan_.slots.size(); ++s) {
      p_.slots[s].name = plan_.slots[s].name;
      p_.slots[s].dtype = plan_.slots[s].dtype;
      if (plan_.slots[s].dtype < DType::opaque)
        p_.slots[s].scalar = scalar_type(plan_.slots[s].dtype);
      p_.slots[s].root = static_cast<SlotId>(s);
    }
    for (const Input& i : plan_.inputs) learn(i);
    for (at_ = 0; at_ < n_instrs(); ++at_)
      std::visit([this](const auto& i) { learn(i); }, plan_.body[static_cast<size_t>(at_)]);
    drops_.resize(plan_.body.size());
    for (size_t s = 0; s < p_.slots.size(); ++s) plan_drop(static_cast<SlotId>(s));
    for (at_ = 0; at_ < n_instrs(); ++at_) {
      std::visit([this](const auto& i) { emit(i); }, plan_.body[static_cast<size_t>(at_)]);
      for (const Step& drop : drops_[static_cast<size_t>(at_)])
        (region_open() ? pending_drops_ : p_.steps).push_back(drop);
    }
    flatten_patches();
    if (p_.generated) use_generated();
    if (!p_.partitions.empty()) {
      p_.partitions.back().last = static_cast<int32_t>(p_.steps.size());
      learn_partitions(p_, patches_, writes_);
    }
    int64_t work_ns = 0;
    p_.small = p_.externs.empty() && p_.pythons.empty() && !p_.gpu;
    for (const RegionInfo& r : p_.regions) {
      p_.small = p_.small && r.is_static && r.work_ns < kSmallRegionNs;
      work_ns += r.work_ns;
    }
    p_.typical_ticks = work_ns * kTicksPerUs / 1000;  // a first guess
  }

 private:
  using Kind = SlotInfo::Kind;

  int n_instrs() const { return static_cast<int>(plan_.body.size()); }
  SlotInfo& info(SlotId s) { return p_.slots[static_cast<size_t>(s)]; }
  const std::optional<int64_t>& constant(ExprId e) const {
    return constants_[static_cast<size_t>(e)];
  }

  // ----------------------------------------------------------------------------------- expressions
  void fold_constants() {
    const size_t n = plan_.exprs.size();
    constants_.resize(n);
    evaluated_.resize(n);
    p_.values.resize(n);
    p_.symbol_exprs.resize(plan_.symbols.size());
    for (size_t i = 0; i < n; ++i) {
      const ExprNode& e = plan_.exprs[i];
      if (e.op == ExprNode::Op::symbol) {
        p_.symbol_exprs[static_cast<size_t>(e.a)].push_back(static_cast<ExprId>(i));
        evaluated_[i] = true;  // written when the symbol is defined
      } else if (e.op == ExprNode::Op::constant ||
                 (constants_[static_cast<size_t>(e.a)] && constants_[static_cast<size_t>(e.b)])) {
        evaluate(e, p_.values.data(), p_.values[i]);
        constants_[i] = p_.values[i];
        evaluated_[i] = true;
      }
    }
  }

  // Emits the evaluation of what is not yet known of these expressions.
  void need(const std::vector<ExprId>& ids) {
    std::vector<ExprId> todo, found;
    for (ExprId e : ids) todo.push_back(e);
    while (!todo.empty()) {
      const ExprId e = todo.back();
      todo.pop_back();
      if (evaluated_[static_cast<size_t>(e)]) continue;
      evaluated_[static_cast<size_t>(e)] = true;
      found.push_back(e);
      todo.push_back(static_cast<ExprId>(plan_.exprs[static_cast<size_t>(e)].a));
      todo.push_back(static_cast<ExprId>(plan_.exprs[static_cast<size_t>(e)].b));
    }
    if (found.empty()) return;
    std::sort(found.begin(), found.end());  // operands stand before their users
    push(StepKind::eval, static_cast<int32_t>(p_.evals.size()), static_cast<int32_t>(found.size()));
    p_.evals.insert(p_.evals.end(), found.begin(), found.end());
  }
  void need(const Shape& shape) {
    need(shape.sizes);
    need(shape.strides);
  }

  // ------------------------------------------------------------------------------------ first walk
  Meta meta(const Shape& shape, DType dtype) const {
    Meta m;
    m.ids = shape;
    m.is_static = true;
    for (const auto* ids : {&shape.sizes, &shape.strides})
      for (ExprId e : *ids) m.is_static = m.is_static && constant(e).has_value();
    if (!m.is_static) return m;
    int64_t span = 1, want = 1;
    bool empty = false;
    m.contiguous = true;
    for (size_t d = 0; d < shape.sizes.size(); ++d) {
      m.sizes.push_back(*constant(shape.sizes[d]));
      m.strides.push_back(*constant(shape.strides[d]));
      empty = empty || m.sizes[d] == 0;
      span += (m.sizes[d] - 1) * m.strides[d];
    }
    for (size_t d = m.sizes.size(); d-- > 0;) {
      m.contiguous = m.contiguous && m.strides[d] == want;
      if (__builtin_mul_overflow(want, std::max<int64_t>(m.sizes[d], 1), &want)) want = -1;
    }
    m.nbytes = empty ? 0 : span * element_size(dtype);
    return m;
  }

  SlotInfo& define(SlotId s, Kind kind, const Shape& shape = {}) {
    SlotInfo& i = info(s);
    i.kind = kind;
    i.meta = meta(shape, i.dtype);
    last_use_[static_cast<size_t>(s)] = at_;
    return i;
  }
  // The slot and everything whose memory it lives in are alive until now.
  void touch(SlotId s) {
    for (; s != kNone; s = info(s).base) last_use_[static_cast<size_t>(s)] = at_;
  }
  // The slot and what it is a view of.
  void mark_written(SlotId s) {
    for (; s != kNone; s = info(s).base) info(s).written = true;
  }
  void use_header(SlotId s, bool escapes = false) {
    touch(s);
    info(s).header = true;
    info(s).escapes = info(s).escapes || escapes;
  }
  void use_operand(const Operand& o, bool escapes) {
    if (o.kind == Operand::Kind::ref) use_header(o.id, escapes);
    for (const Operand& item : o.items) use_operand(item, escapes);
  }
  void use_results(const std::vector<Result>& outs) {
    for (const Result& r : outs)
      if (r.kind == Result::Kind::tensor) define(r.id, Kind::result);
  }

  void learn(const Input& i) {
    if (i.kind == Input::Kind::symbol) return;
    SlotInfo& s = info(i.id);
    s.kind = i.kind == Input::Kind::tensor ? Kind::input : Kind::opaque;
    s.meta = meta(i.shape, s.dtype);
    if (i.kind == Input::Kind::tensor) s.device = device(i.device);
  }
  c10::Device device(const std::string& text) {
    if (text == "cpu") return c10::kCPU;
    c10::Device d(c10::kCPU);
    try {
      d = c10::Device(text);
    } catch (const c10::Error&) {
      throw LoadError("there is no device '" + text + "'");
    }
    if (!d.is_cuda()) throw LoadError("a tensor on device '" + text + "'");
    if (!p_.gpu) p_.gpu.emplace(d);
    const auto is_known = [&](const Accelerator& g) { return g.device() == d; };
    if (!is_known(*p_.gpu) && std::none_of(p_.others.begin(), p_.others.end(), is_known))
      p_.others.emplace_back(d);
    return d;
  }
  void learn(const Symbol& i) {
    if (i.value.kind == Source::Kind::expr) return;
    use_header(i.value.tensor);
    info(i.value.tensor).found = true;
  }
  void learn(const AssertScalar&) {}
  void learn(const AssertSizeStride& i) { use_header(i.tensor); }
  void learn(const AssertAlignment& i) { touch(i.tensor); }
  void learn(const CheckFinite& i) { use_header(i.tensor); }
  void learn(const Arena& i) {
    define(i.slot, Kind::arena).device = device(i.device);
    p_.arena_bytes = constant(i.nbytes).value_or(0);
  }
  void learn(const Place& i) {
    SlotInfo& s = define(i.slot, Kind::place, i.shape);
    scalar_type(s.dtype);
    s.base = i.arena;
    s.offset = i.offset;
    if (!constant(i.offset)) return;
    s.root = i.arena;
    s.delta = *constant(i.offset);
    s.folded = true;
    learn_reach(s);
  }
  void learn(const Alloc& i) {
    SlotInfo& s = define(i.slot, Kind::alloc, i.shape);
    s.device = device(i.device);
    scalar_type(s.dtype);
  }
  void learn(const Reuse& i) {
    SlotInfo& s = define(i.slot, Kind::view, i.shape);
    s.base = i.old;
    s.root = info(i.old).root;
    s.delta = info(i.old).delta;
    s.folded = true;
    const SlotInfo& old = info(i.old);
    const bool whole = s.meta.ids.sizes == old.meta.ids.sizes &&
                       s.meta.ids.strides == old.meta.ids.strides &&
                       element_size(s.dtype) <= element_size(old.dtype);
    s.inside = whole && (old.kind == Kind::alloc || old.inside);
    if (!s.inside) learn_reach(s);
    if (!s.inside) touch(i.old);
  }
  void learn(const Free&) {}  // liveness is computed here: it ends no later than Free says
  void learn(const View& i) {
    SlotInfo& s = define(i.slot, Kind::view, i.shape);
    if (s.scalar == c10::ScalarType::Undefined)
      use_header(i.base);  // which brings the element type
    const SlotInfo& base = info(i.base);
    s.base = i.base;
    s.offset = i.offset;
    // The storage of an allocation starts where it points; elsewhere only the tensor knows.
    const bool from_storage = !i.relative && info(base.root).kind != Kind::alloc;
    s.relative = i.relative;
    // Its memory is asked for its end.
    if (!constant(i.offset) || from_storage) return touch(i.base);
    s.root = base.root;
    s.delta = (i.relative ? base.delta : 0) + *constant(i.offset) * element_size(s.dtype);
    s.folded = true;
    learn_reach(s);
    if (!s.inside) touch(i.base);
  }
  // Where it is known at load whether the slot lies in its memory: all is constant, and the
  // verifier has compared it with what the program allocates; of another's tensor, that is asked
  // when it comes. Elsewhere a step asks: of a result whose sizes the program reads, after its own
  // checks of them.
  void learn_reach(SlotInfo& s) {
    if (!s.meta.is_static || s.scalar == c10::ScalarType::Undefined) return;
    SlotInfo& root = info(s.root);
    if (root.kind == Kind::arena || root.kind == Kind::alloc) {
      const int64_t room = root.kind == Kind::arena ? p_.arena_bytes
                           : root.meta.is_static    ? root.meta.nbytes
                                                    : 0;
      s.inside = s.meta.nbytes == 0 ||
                 (s.delta >= 0 && s.meta.nbytes <= room && s.delta <= room - s.meta.nbytes);
      return;
    }
    s.inside = root.kind != Kind::opaque && root.kind != Kind::place && root.kind != Kind::view &&
               !root.found;
    if (!s.inside || s.meta.nbytes == 0) return;
    const int64_t own = root.kind == Kind::input && root.meta.is_static ? root.meta.nbytes : 0;
    // As every tensor.
    if (s.delta >= 0 && s.meta.nbytes <= own && s.delta <= own - s.meta.nbytes) return;
    root.reaches = true;
    root.lowest = std::min(root.lowest, s.delta);
    root.highest = std::max(root.highest, s.delta + s.meta.nbytes);
  }
  void learn(const Constant& i) {
    SlotInfo& s = define(i.slot, Kind::constant);
    const at::Tensor& t = p_.constants[static_cast<size_t>(i.index)];
    if (is_odd(t)) p_.constants[static_cast<size_t>(i.index)] = materialised(t);
    s.offset = i.index;
    s.dtype = from_scalar_type(t.scalar_type());
    s.meta.is_static = true;
    s.meta.sizes = t.sizes().vec();
    s.meta.strides = t.strides().vec();
  }
  void learn(const Launch& i) {
    p_.kernel_devices.resize(plan_.kernels.size(), c10::kCPU);
    p_.kernel_devices[static_cast<size_t>(i.kernel)] =
        device(plan_.kernels[static_cast<size_t>(i.kernel)].device);
    for (SlotId s : i.outs) mark_written(s);
    for (SlotId s : i.args) touch(s);
  }
  void learn(const CallExtern& i) {
    const bool escapes = i.may_keep;
    for (const Operand& o : i.args) use_operand(o, escapes);
    for (const KeywordOperand& o : i.kwargs) use_operand(o.value, escapes);
    for (SlotId s : i.into) {
      use_header(s);
      mark_written(s);
    }
    use_results(i.outs);
    p_.needs_guard = true;
  }
  void learn(const CallPython& i) {
    for (const Operand& o : i.args) use_operand(o, true);
    for (const KeywordOperand& o : i.kwargs) use_operand(o.value, true);
    use_results(i.outs);
    p_.needs_guard = true;
  }
  void learn(const Copy& i) {
    mark_written(i.dst);
    use_header(i.dst);
    use_header(i.src);
    p_.needs_guard = true;
  }
  void learn(const BumpVersion& i) {
    mark_written(i.tensor);
    use_header(i.tensor);
  }
  void learn(const Partition&) {}
  void learn(const Fill& i) {
    mark_written(i.tensor);
    use_header(i.tensor);
    p_.needs_guard = true;
  }
  void learn(const Return& i) {
    for (const Operand& o : i.values) {
      use_operand(o, true);
      if (o.kind == Operand::Kind::ref) info(o.id).escapes = true;
      if (o.kind == Operand::Kind::value) use_header(o.id);
    }
  }

  // ----------------------------------------------------------------------------------- second walk
  void push(StepKind kind, int32_t a = kNone, int32_t b = kNone) {
    p_.steps.push_back({kind, a, b});
  }

  void plan_drop(SlotId s) {
    const SlotInfo& i = info(s);
    const int last = last_use_[static_cast<size_t>(s)];
    const bool owned = i.kind == Kind::alloc || i.kind == Kind::result ||
                       ((i.kind == Kind::view || i.kind == Kind::place) && i.header);
    if (owned) p_.owned.push_back(s);
    if (i.kind == Kind::place) return;  // its header is kept from call to call and owns nothing
    if (last + 1 == n_instrs() || (!owned && i.kind != Kind::input)) return;
    const Step drop{i.kind == Kind::input ? StepKind::drop_input : StepKind::drop, s, kNone};
    if (last < 0)
      p_.steps.push_back(drop);
    else
      drops_[static_cast<size_t>(last)].push_back(drop);
  }

  bool region_open() const { return !region_.empty(); }

  void close_region() {
    if (!region_open()) return;
    RegionInfo r{static_cast<int32_t>(p_.launches.size()), static_cast<int32_t>(region_.size())};
    for (LaunchInfo& l : region_) {
      const auto& work = constant(l.work_ns);
      r.is_static = r.is_static && work.has_value();
      if (work) r.work_ns += *work;
      if (work && l.parallel && *work >= kSplitTaskNs) r.split_ns += *work;
      p_.launches.push_back(std::move(l));
    }
    push(StepKind::region, static_cast<int32_t>(p_.regions.size()));
    p_.regions.push_back(r);
    region_.clear();
    p_.steps.insert(p_.steps.end(), pending_drops_.begin(), pending_drops_.end());
    pending_drops_.clear();
  }

  // Memory that dies in the open region is only given back at its end: large memory is worth ending
  // it before an allocation.
  void close_before_alloc() {
    for (const Step& d : pending_drops_) {
      const SlotInfo& i = info(d.a);
      if (i.kind != Kind::view &&
          (!i.meta.is_static || i.kind == Kind::result || i.meta.nbytes >= kRegionBreakBytes))
        return close_region();
    }
  }

  // A tensor or pointer that is not at a constant distance from a root, and its header where one is
  // needed.
  void emit_slot(SlotId s) {
    const SlotInfo& i = info(s);
    if (!i.inside) need(i.meta.ids);
    if (!i.folded) {
      need(std::vector<ExprId>{i.offset});
      push(StepKind::pointer, s);
    } else if (!i.inside && !i.header && !p_.gpu) {
      // Kernels alone read it. On a GPU recordings may have its memory elsewhere than this step.
      push(StepKind::inside, s);
      mark_pointer(s);
    }
    if (!i.header) return;
    need(i.meta.ids);
    push(StepKind::header, s);
  }
  int32_t add_buf(SlotId s) {
    patches_[static_cast<size_t>(info(s).root)].push_back(
        {static_cast<int32_t>(p_.n_bufs), info(s).delta});
    return static_cast<int32_t>(p_.n_bufs++);
  }

  void emit(const Symbol& i) {
    switch (i.value.kind) {
      case Source::Kind::expr:
        need(std::vector<ExprId>{i.value.expr});
        push(StepKind::define, i.symbol, i.value.expr);
        return;
      case Source::Kind::item:
        close_region();
        push(StepKind::read_symbol, at_);
        return;
      default: push(StepKind::read_symbol, at_);
    }
  }
  void emit(const AssertScalar& i) {
    need(std::vector<ExprId>{i.expr});
    need(i.values);
    push(StepKind::assert_scalar, at_);
  }
  void emit(const AssertSizeStride& i) {
    need(i.shape);
    push(StepKind::assert_size_stride, at_);
  }
  void emit(const AssertAlignment& i) {
    push(StepKind::assert_alignment, at_);
    mark_pointer(i.tensor);
  }
  void emit(const CheckFinite&) {
    close_region();
    push(StepKind::check_finite, at_);
  }
  void emit(const Arena& i) {
    need(std::vector<ExprId>{i.nbytes});
    push(StepKind::arena, i.slot, i.nbytes);
  }
  void emit(const Place& i) { emit_slot(i.slot); }
  void emit(const Alloc& i) {
    close_before_alloc();
    need(i.shape);
    push(StepKind::alloc, i.slot);
  }
  void emit(const Reuse& i) { emit_slot(i.slot); }
  void emit(const Free&) {}
  void emit(const View& i) { emit_slot(i.slot); }
  void emit(const Constant&) {}
  void write(SlotId s) { writes_.emplace_back(static_cast<int32_t>(p_.partitions.size()) - 1, s); }
  void emit(const Launch& i) {
    for (SlotId s : i.outs) write(s);
    if (plan_.kernels[static_cast<size_t>(i.kernel)].device != "cpu") return emit_grid(i);
    LaunchInfo l{i.kernel,
                 kernel(i.kernel),
                 {static_cast<int32_t>(p_.n_bufs), static_cast<int32_t>(i.args.size())},
                 {static_cast<int32_t>(p_.n_syms), static_cast<int32_t>(i.sizes.size())},
                 i.sizes,
                 false,
                 i.work_ns,
                 i.parallel,
                 i.barrier};
    for (SlotId s : i.args) add_buf(s);
    need(i.sizes);
    need(std::vector<ExprId>{i.work_ns});
    for (ExprId e : i.sizes) l.dynamic_sizes = l.dynamic_sizes || !constant(e);
    p_.n_syms += static_cast<int64_t>(i.sizes.size());
    region_.push_back(std::move(l));
  }
  void emit_grid(const Launch& i) {
    close_region();
    GridLaunch l{i.kernel,
                 grid_kernel(i.kernel),
                 {static_cast<int32_t>(p_.n_bufs), static_cast<int32_t>(i.args.size())},
                 {static_cast<int32_t>(p_.n_syms), static_cast<int32_t>(i.sizes.size())},
                 {static_cast<int32_t>(p_.n_params), 0},
                 i.sizes,
                 false,
                 i.grid};
    l.params.n = static_cast<int32_t>(l.loaded->n_parameters());
    for (SlotId s : i.args) add_buf(s);
    need(i.sizes);
    need(std::vector<ExprId>{i.grid});
    for (ExprId e : i.sizes) l.dynamic_sizes = l.dynamic_sizes || !constant(e);
    p_.n_syms += l.sizes.n;
    p_.n_params += l.params.n;
    push(StepKind::launch, static_cast<int32_t>(p_.grid_launches.size()));
    p_.grid_launches.push_back(std::move(l));
  }
  const cuda::Kernel* grid_kernel(int32_t k) {
    if (!p_.cubins) throw LoadError("the program has GPU kernels and no file of them was given");
    p_.kernels.resize(plan_.kernels.size());
    const cuda::Kernel*& loaded = p_.kernels[static_cast<size_t>(k)];
    if (loaded) return loaded;
    const c10::DeviceGuard there(p_.kernel_devices[static_cast<size_t>(k)]);
    p_.on(there.current_device()).stream();  // kernels are loaded into a current context
    const Kernel& kernel = plan_.kernels[static_cast<size_t>(k)];
    loaded = p_.cubins->share(kernel.name, static_cast<size_t>(kernel.n_args + kernel.n_sizes));
    return loaded;
  }
  KernelFn kernel(int32_t k) {
    p_.functions.resize(plan_.kernels.size());
    KernelFn& fn = p_.functions[static_cast<size_t>(k)];
    if (!p_.library) throw LoadError("the program has kernels and no kernel library was given");
    const Kernel& made = plan_.kernels[static_cast<size_t>(k)];
    if (!fn) fn = p_.library->kernel(made.name, made.n_args, made.n_sizes);
    return fn;
  }

  void need_operand(const Operand& o) {
    if (o.kind == Operand::Kind::size) need(std::vector<ExprId>{o.id});
    for (const Operand& item : o.items) need_operand(item);
  }
  template <class Call>
  void need_operands(const Call& i) {
    for (const Operand& o : i.args) need_operand(o);
    for (const KeywordOperand& o : i.kwargs) need_operand(o.value);
  }
  void emit(const CallExtern& i) {
    close_region();
    for (SlotId s : i.into) write(s);
    need_operands(i);
    CallExtern renumbered = i;
    const std::vector<SlotId> given = number_operands(renumbered);
    ExternCall call = resolve_extern(renumbered, constants_);
    call.n_given = static_cast<int32_t>(n_given_);
    if (p_.gpu)
      call.road = ExternCall::Road::boxed;  // the other roads are those of the CPU
    else
      bind_gemm(call, given);
    p_.forks |= call.forks;
    push(StepKind::call_extern, static_cast<int32_t>(p_.externs.size()));
    p_.stack_size = std::max(p_.stack_size, call.stack.size());
    p_.externs.push_back(std::move(call));
  }
  // mm and addmm of float or double with shapes that the plan knows run on pointers alone, see
  // gemm.cpp.
  void bind_gemm(ExternCall& call, const std::vector<SlotId>& given) {
    if (call.road != ExternCall::Road::mm && call.road != ExternCall::Road::addmm) return;
    const size_t n = call.tensors.size() - (call.makes_result ? 1 : 0);
    const auto slot = [&](size_t k) {
      return p_.generated ? given[static_cast<size_t>(call.tensors[k])] : call.tensors[k];
    };
    const DType dtype = info(slot(0)).dtype;
    if (dtype != DType::f32 && dtype != DType::f64) return;
    for (size_t k = 0; k < n; ++k) {
      const SlotInfo& i = info(slot(k));
      if (i.kind == Kind::result || i.dtype != dtype) return;
      need(i.meta.ids);
    }
    call.single = dtype == DType::f32;
    call.bufs = static_cast<int32_t>(p_.n_bufs);
    if (!p_.generated)
      for (SlotId s : call.tensors) add_buf(s);
  }
  void emit(const CallPython& i) {
    close_region();
    need_operands(i);
    CallPython renumbered = i;
    number_operands(renumbered);
    push(StepKind::call_python, static_cast<int32_t>(p_.pythons.size()));
    p_.pythons.push_back({i.index, i.label, renumbered.args, renumbered.kwargs, i.outs,
                          static_cast<int32_t>(n_given_)});
  }

  // A generated program hands operands over in a list, constants aside: they are numbered so, see
  // Operands. The slots of the tensors among them, by number.
  template <class Call>
  std::vector<SlotId> number_operands(Call& call) {
    std::vector<SlotId> slots;
    n_given_ = 0;
    if (!p_.generated) return slots;
    const auto number = [&](auto& self, Operand& o) -> void {
      const bool tensor = o.kind == Operand::Kind::ref;
      if (tensor || (o.kind == Operand::Kind::size && !is_literal(o.id))) {
        slots.push_back(tensor ? o.id : kNone);
        o.id = static_cast<int32_t>(tensor ? n_given_ : plan_.exprs.size() + n_given_);
        ++n_given_;
      }
      for (Operand& item : o.items) self(self, item);
    };
    for (Operand& o : call.args) number(number, o);
    for (KeywordOperand& o : call.kwargs) number(number, o.value);
    constants_.resize(std::max(constants_.size(), plan_.exprs.size() + n_given_));
    return slots;
  }
  bool is_literal(ExprId e) const {
    return plan_.exprs[static_cast<size_t>(e)].op == ExprNode::Op::constant;
  }
  void emit(const Copy& i) {
    close_region();
    write(i.dst);
    push(StepKind::copy, at_);
  }
  void emit(const BumpVersion& i) { push(StepKind::bump, i.tensor); }
  void emit(const Partition& i) {
    close_region();
    if (!p_.gpu || p_.generated) return;       // a CPU has nothing to record
    const bool first = p_.partitions.empty();  // unused inputs are dropped before anything runs
    const auto at = first ? 0 : static_cast<int32_t>(p_.steps.size());
    if (!first) p_.partitions.back().last = at;
    p_.partitions.push_back({.first = at, .last = at, .recorded = i.recorded});
  }
  void emit(const Fill& i) {
    close_region();
    write(i.tensor);
    need_operand(i.value);
    push(StepKind::fill, at_);
  }
  void emit(const Return& i) {
    close_region();
    for (const Operand& o : i.values) need_operand(o);
    p_.outputs = &i.values;
  }

  // A root whose pointer is used by more than patches (headers of views, dynamic offsets, checks).
  void mark_pointer(SlotId s) { info(info(s).root).needs_pointer = true; }

  void flatten_patches() {
    for (size_t s = 0; s < p_.slots.size(); ++s) {
      SlotInfo& i = p_.slots[s];
      if ((i.kind == Kind::view || i.kind == Kind::place) && (i.header || !i.folded)) {
        mark_pointer(static_cast<SlotId>(s));
        if (i.base != kNone) mark_pointer(i.base);
      }
    }
    for (size_t s = 0; s < p_.slots.size(); ++s) {
      SlotInfo& i = p_.slots[s];
      i.patches = {static_cast<int32_t>(p_.patches.size()),
                   static_cast<int32_t>(patches_[s].size())};
      i.needs_pointer = i.needs_pointer || !patches_[s].empty();
      p_.patches.insert(p_.patches.end(), patches_[s].begin(), patches_[s].end());
    }
  }

  // The library runs instead of the steps: nothing here could.
  void use_generated() {
    p_.steps.clear();
    p_.patches.clear();
    for (SlotInfo& i : p_.slots) i.patches = {};
    p_.functions.resize(plan_.kernels.size());
  }

  Code& p_;
  const Plan& plan_;
  size_t n_given_ = 0;
  std::vector<std::vector<Patch>> patches_;
  std::vector<int> last_use_;
  std::vector<std::vector<Step>> drops_;
  std::vector<std::optional<int64_t>> constants_;
  std::vector<bool> evaluated_;
  std::vector<LaunchInfo> region_;
  std::vector<Step> pending_drops_;
  std::vector<std::pair<int32_t, SlotId>> writes_;  // partition, what it writes
  int at_ = -1;
};

void load(Code& code) {
  if (code.constants.size() != static_cast<size_t>(code.plan.n_constants))
    throw LoadError("the program wants " + std::to_string(code.plan.n_constants) +
                    " constants and got " + std::to_string(code.constants.size()));
  code.full_precision =
      at::globalContext().float32MatmulPrecision() == at::Float32MatmulPrecision::HIGHEST;
  Loader(code).run();
}

}  // namespace plait
