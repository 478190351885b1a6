// native/core/manifest.cpp: the bytes of a package's manifest.
//
// A sequence of i64 words and of texts (a word with their bytes, then UTF-8); lists start with
// their number of items:
//   versions: (program, version) each
//   the program's name; `single`
//   math: names of the functions that kernels are given addresses of
//   storages: (offset in `weights`, a multiple of 64; bytes; device) each
//   weights, constants: (name, storage, dtype, offset in elements, rank, sizes, strides) each
//   folded: names of weights that were put into others
//   constants among the arguments: (position among all, name, kind: 0 None | 1 bool | 2 int |
//             3 float | 4 str | 5 other, word, text, what errors show) each
//   names of the other arguments, of symbols, of the results
//   inputs: 0 and the number of a weight | 2 and the number of a symbol | 3, argument, dim |
//           1, argument, dtype, device, dims, layout (0 any, 1 listed, 2 contiguous), if listed
//           dims
//     dims: (0) any | (1, number) | (2, symbol, lowest, highest) each
//   results: (0) the program's |
//            (2, input, requires_grad, 0 or 1: is there an offset, offset) a view of an input
//   conditions: text, facts, nodes each
//     facts: (0 the int | 1 size | 2 stride | 3 offset in the storage, argument, dim or 0) each
//     nodes: (operator, a, b) each, operators as in plans, 0 is the number a, 1 is fact a
//   variants: (machine, plan, kernels, cubins) each, names of sections or empty
#include "core/manifest.h"

#include <algorithm>
#include <cstring>

#include "core/checksum.h"
#include "plait/errors.h"

namespace plait {
namespace {

constexpr int64_t kMaxRank = 64;

// The words and texts of a manifest.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  [[noreturn]] static void fail(const std::string& what) {
    throw PackageError("damaged section 'manifest': " + what);
  }
  int64_t word() {
    if (bytes_.size() < 8) fail("it ends too early");
    int64_t value = 0;
    std::memcpy(&value, bytes_.data(), 8);
    bytes_ = bytes_.subspan(8);
    return value;
  }
  // A number in [lo, hi).
  int64_t id(int64_t lo, int64_t hi, const char* what) {
    const int64_t w = word();
    if (w < lo || w >= hi) fail(std::string(what) + " " + std::to_string(w) + " is out of range");
    return w;
  }
  bool flag() { return id(0, 2, "flag") != 0; }
  int64_t size() { return id(0, INT64_MAX, "size"); }
  std::string text() {
    const auto n = static_cast<uint64_t>(word());
    if (n > bytes_.size()) fail("it ends within a text");
    std::string s(reinterpret_cast<const char*>(bytes_.data()), n);
    bytes_ = bytes_.subspan(n);
    return s;
  }
  // A list, whose items take at least a word each.
  template <class Item>
  auto list(Item&& item) {
    const auto n = static_cast<uint64_t>(word());
    if (n > bytes_.size() / 8) fail("a count is out of range");
    std::vector<decltype(item())> out;
    out.reserve(n);
    for (uint64_t i = 0; i < n; ++i) out.push_back(item());
    return out;
  }
  bool done() const { return bytes_.empty(); }

 private:
  std::span<const std::byte> bytes_;
};

class ManifestParser {
 public:
  ManifestParser(std::span<const std::byte> bytes, uint64_t n_weight_bytes)
      : in_(bytes), n_weight_bytes_(n_weight_bytes) {}

  // Braced initialisers are evaluated left to right, so the fields stand in the order of the words.
  Manifest parse() {
    m_.versions =
        in_.list([&] { return std::pair<std::string, std::string>{in_.text(), in_.text()}; });
    m_.name = in_.text();
    m_.signature.single = in_.flag();
    m_.math = texts();
    m_.storages = in_.list([&] { return storage(); });
    m_.weights = in_.list([&] { return tensor(); });
    m_.constants = in_.list([&] { return tensor(); });
    m_.folded = texts();
    m_.fixed = in_.list([&] { return fixed(); });
    m_.signature.names = texts();
    m_.signature.symbols = texts();
    m_.outputs = texts();
    m_.signature.inputs = in_.list([&] { return input(); });
    m_.signature.results = in_.list([&] { return result(); });
    m_.signature.conditions = in_.list([&] { return condition(); });
    m_.variants =
        in_.list([&] { return Manifest::Variant{in_.text(), in_.text(), in_.text(), in_.text()}; });
    if (!in_.done()) Reader::fail("bytes are left over");
    if (next_position_ > static_cast<int64_t>(m_.fixed.size() + m_.signature.names.size()))
      Reader::fail("a constant stands behind the last argument");
    if (m_.signature.single && m_.outputs.size() != 1) Reader::fail("a single result has one name");
    return std::move(m_);
  }

 private:
  Manifest::Texts texts() {
    return in_.list([&] { return in_.text(); });
  }
  int64_t index(size_t n, const char* what) { return in_.id(0, static_cast<int64_t>(n), what); }

  Manifest::Storage storage() {
    Manifest::Storage s{in_.size(), in_.size(), in_.text()};
    const auto first = static_cast<uint64_t>(s.offset);
    if (first % kWeightAlign != 0 || first > n_weight_bytes_ ||
        static_cast<uint64_t>(s.nbytes) > n_weight_bytes_ - first)
      Reader::fail("a storage lies outside the weights");
    return s;
  }
  DType dtype() {
    const std::string name = in_.text();
    for (int32_t d = 0; d < static_cast<int32_t>(DType::opaque); ++d)
      if (name == dtype_name(static_cast<DType>(d))) return static_cast<DType>(d);
    Reader::fail("there is no dtype '" + name + "'");
  }
  Manifest::Tensor tensor() {
    Manifest::Tensor t;
    t.name = in_.text();
    t.storage = static_cast<int32_t>(index(m_.storages.size(), "storage"));
    t.dtype = dtype();
    t.offset = in_.size();
    const int64_t rank = in_.id(0, kMaxRank + 1, "rank");
    for (int64_t d = 0; d < rank; ++d) t.sizes.push_back(in_.size());
    for (int64_t d = 0; d < rank; ++d) t.strides.push_back(in_.size());
    if (end(t) > m_.storages[static_cast<size_t>(t.storage)].nbytes)
      Reader::fail("'" + t.name + "' reaches beyond its storage");
    return t;
  }
  // The byte after its last one.
  static int64_t end(const Manifest::Tensor& t) {
    int64_t last = t.offset, step = 0, numel = 1;
    bool overflow = false, empty = false;
    for (size_t d = 0; d < t.sizes.size(); ++d) {
      empty |= t.sizes[d] == 0;
      overflow |= __builtin_mul_overflow(numel, std::max<int64_t>(t.sizes[d], 1), &numel) ||
                  (t.sizes[d] > 0 && (__builtin_mul_overflow(t.sizes[d] - 1, t.strides[d], &step) ||
                                      __builtin_add_overflow(last, step, &last)));
    }
    overflow |= __builtin_add_overflow(last, 1, &last) ||
                __builtin_mul_overflow(last, element_size(t.dtype), &last) ||
                __builtin_mul_overflow(numel, element_size(t.dtype), &numel);
    if (overflow) Reader::fail("the size of '" + t.name + "' overflows");
    return empty ? 0 : last;
  }

  Manifest::Fixed fixed() {
    using Kind = Manifest::Fixed::Kind;
    Manifest::Fixed f{in_.id(next_position_, INT32_MAX, "position"), in_.text()};
    next_position_ = f.position + 1;
    f.kind = static_cast<Kind>(in_.id(0, 6, "kind of constant"));
    f.word = in_.word();
    f.text = in_.text();
    f.shown = in_.text();
    return f;
  }

  Dim dim() {
    Dim d{static_cast<Dim::Kind>(in_.id(0, 3, "kind of dimension"))};
    if (d.kind == Dim::Kind::fixed) d.value = in_.word();
    if (d.kind != Dim::Kind::symbol) return d;
    d.value = index(m_.signature.symbols.size(), "symbol");
    d.lo = in_.word();
    d.hi = in_.word();
    return d;
  }
  InputSpec input() {
    using Kind = InputSpec::Kind;
    InputSpec s;
    s.kind = static_cast<Kind>(in_.id(0, 4, "kind of input"));
    if (s.kind == Kind::symbol)
      s.integer = {Dim::Kind::symbol, index(m_.signature.symbols.size(), "symbol")};
    if (s.kind == Kind::bound) {
      s.arg = index(m_.weights.size(), "weight");
      s.name = m_.weights[static_cast<size_t>(s.arg)].name;
    }
    if (s.kind != Kind::tensor && s.kind != Kind::integer) return s;
    s.arg = index(m_.signature.names.size(), "argument");
    if (s.kind == Kind::integer) s.integer = dim();
    if (s.kind == Kind::integer) return s;
    s.dtype = in_.text();
    s.device = in_.text();
    s.sizes = in_.list([&] { return dim(); });
    s.layout = static_cast<InputSpec::Layout>(in_.id(0, 3, "layout"));
    if (s.layout == InputSpec::Layout::listed) s.strides = in_.list([&] { return dim(); });
    return s;
  }
  Produced result() {
    Produced r;
    r.kind = static_cast<Produced::Kind>(in_.id(0, 3, "kind of result"));
    if (r.kind == Produced::Kind::input) Reader::fail("a result is an input");
    if (r.kind == Produced::Kind::program) return r;
    r.arg = index(m_.signature.inputs.size(), "input");
    r.requires_grad = in_.flag();
    const bool known = in_.flag();
    const int64_t offset = in_.word();
    if (known) r.offset = offset;
    return r;
  }
  Condition condition() {
    Condition c{in_.text(), in_.list([&] { return fact(); }), {}};
    size_t n = 0;
    c.nodes = in_.list([&] {
      ExprNode e{static_cast<ExprOp>(in_.id(0, kCount<ExprOp>, "expression operator"))};
      const bool constant = e.op == ExprNode::Op::constant, is_fact = e.op == ExprNode::Op::symbol;
      e.a = constant ? in_.word() : index(is_fact ? c.facts.size() : n, "expression");
      e.b = index(constant || is_fact ? 1 : n, "expression");
      ++n;
      return e;
    });
    if (c.nodes.empty()) Reader::fail("a condition is empty");
    return c;
  }
  Condition::Fact fact() {
    using Kind = Condition::Fact::Kind;
    const auto kind = static_cast<Kind>(in_.id(0, 4, "kind of fact"));
    const auto of = kind == Kind::integer ? InputSpec::Kind::integer : InputSpec::Kind::tensor;
    const int64_t arg = in_.word();
    const std::vector<InputSpec>& inputs = m_.signature.inputs;
    size_t i = 0;
    while (i < inputs.size() && (inputs[i].kind != of || inputs[i].arg != arg)) ++i;
    if (i == inputs.size()) Reader::fail("a condition reads what is no input");
    const bool has_dim = kind == Kind::size || kind == Kind::stride;
    return {kind, i, index(has_dim ? inputs[i].sizes.size() : 1, "dimension")};
  }

  Reader in_;
  uint64_t n_weight_bytes_;
  int64_t next_position_ = 0;
  Manifest m_;
};

}  // namespace

Manifest read_manifest(std::span<const std::byte> bytes, uint64_t n_weight_bytes) {
  return ManifestParser(bytes, n_weight_bytes).parse();
}

}  // namespace plait
