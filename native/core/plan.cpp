// native/core/plan.cpp: plan bytes -> Plan.
//
// Layout, little-endian: 8 bytes magic "PLAITNPL", u32 version, u32 crc32 of the payload, u64
// payload bytes; then the payload: i64 number of words, the words (i64), the bytes of all strings
// (UTF-8). The words are, in order:
//   strings:  n, then (offset, length) each
//   program:  name string, n_constants, n_callables, n_results
//   exprs:    n, then (op, a, b) each
//   symbols:  n, then name each
//   slots:    n, then (name, dtype) each
//   inputs:   n, then (kind, id) each; a tensor goes on with rank, sizes, strides, device
//   kernels:  n, then (name, n_args, n_sizes, n checks, (error, message) each, device) each
//   body:     n, then (opcode, words of this instruction, fields) each
//   programs: n, then (offset, length) each: plans among the bytes of the strings
// Every count and id is checked as it is read, so that no byte string can make the reader leave its
// bounds.
#include "plan.h"

#include "functions.h"

#include <array>
#include <cstring>

namespace plait {
namespace {

constexpr char kMagic[8] = {'P', 'L', 'A', 'I', 'T', 'N', 'P', 'L'};
constexpr size_t kHeaderBytes = 24;
constexpr int64_t kMaxRank = 64;
constexpr int kMaxNesting = 8;
constexpr int kMaxProgramNesting = 64;

uint32_t crc32(std::span<const std::byte> bytes) {
  static const std::array<uint32_t, 256> table = [] {
    std::array<uint32_t, 256> t{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = (c & 1) ? 0xEDB88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  uint32_t crc = 0xFFFFFFFFu;
  for (std::byte b : bytes) crc = table[(crc ^ static_cast<uint8_t>(b)) & 0xFF] ^ (crc >> 8);
  return crc ^ 0xFFFFFFFFu;
}

[[noreturn]] void fail(const std::string& what) { throw PlanError("damaged plan: " + what); }

class Reader {
 public:
  Reader(std::span<const std::byte> payload) {
    if (payload.size() < 8) fail("no room for the word count");
    int64_t n = 0;
    std::memcpy(&n, payload.data(), 8);
    if (n < 0 || static_cast<uint64_t>(n) > (payload.size() - 8) / 8)
      fail("word count out of range");
    words_.resize(static_cast<size_t>(n));
    if (n > 0) std::memcpy(words_.data(), payload.data() + 8, words_.size() * 8);
    text_ = payload.subspan(8 + words_.size() * 8);
  }

  int64_t word() {
    if (at_ >= words_.size()) fail("it ends too early");
    return words_[at_++];
  }
  // A number in [lo, hi).
  int32_t id(int64_t lo, int64_t hi, const char* what) {
    const int64_t w = word();
    if (w < lo || w >= hi) fail(std::string(what) + " " + std::to_string(w) + " is out of range");
    return static_cast<int32_t>(w);
  }
  // A count of things that take at least one word each.
  size_t count() {
    const int64_t n = word();
    if (n < 0 || static_cast<uint64_t>(n) > words_.size() - at_) fail("a count is out of range");
    return static_cast<size_t>(n);
  }
  template <class E>
  E one_of(const char* what) {
    return static_cast<E>(id(0, kCount<E>, what));
  }
  // Braced initialisers of an item are evaluated left to right, in the order of the words.
  template <class Item>
  auto list(Item&& item) {
    std::vector<decltype(item())> out;
    for (size_t n = count(); n > 0; --n) out.push_back(item());
    return out;
  }
  bool flag() { return id(0, 2, "flag") != 0; }
  std::string string() {
    return strings_[static_cast<size_t>(id(0, static_cast<int64_t>(strings_.size()), "string"))];
  }
  size_t position() const { return at_; }
  bool done() const { return at_ == words_.size(); }

  std::span<const std::byte> bytes() {
    const int64_t offset = word(), length = word();
    if (offset < 0 || length < 0 || static_cast<uint64_t>(offset) > text_.size() ||
        static_cast<uint64_t>(length) > text_.size() - static_cast<uint64_t>(offset))
      fail("a string lies outside the text");
    return text_.subspan(static_cast<size_t>(offset), static_cast<size_t>(length));
  }
  void read_strings() {
    const size_t n = count();
    strings_.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      const auto text = bytes();
      strings_.emplace_back(reinterpret_cast<const char*>(text.data()), text.size());
      if (!is_utf8(strings_.back())) fail("a string is no UTF-8");
    }
  }

 private:
  std::vector<int64_t> words_;
  std::span<const std::byte> text_;
  std::vector<std::string> strings_;
  size_t at_ = 0;
};

Plan read_nested(std::span<const std::byte> bytes, int depth);

class Parser {
 public:
  Parser(std::span<const std::byte> payload, int depth) : in_(payload), depth_(depth) {}

  Plan parse() {
    in_.read_strings();
    plan_.name = in_.string();
    plan_.n_constants = in_.id(0, INT32_MAX, "number of constants");
    plan_.n_callables = in_.id(0, INT32_MAX, "number of callables");
    plan_.n_results = in_.id(kNone, INT32_MAX, "number of results");
    parse_exprs();
    for (size_t n = symbols_after_exprs_; n > 0; --n) plan_.symbols.push_back(in_.string());
    plan_.slots = in_.list([&] { return Slot{in_.string(), dtype()}; });
    plan_.inputs = in_.list([&] { return input(); });
    plan_.kernels = in_.list([&] {
      return Kernel{in_.string(), in_.id(0, INT32_MAX, "kernel argument count"),
                    in_.id(0, INT32_MAX, "kernel size count"), checks(), in_.string()};
    });
    for (size_t n = in_.count(); n > 0; --n) {
      const int32_t opcode = in_.id(0, static_cast<int64_t>(std::variant_size_v<Instr>), "opcode");
      const int64_t length = in_.word();
      const size_t start = in_.position();
      plan_.body.push_back(read_instr(*this, opcode));
      if (length != static_cast<int64_t>(in_.position() - start))
        fail("an instruction has a wrong length");
    }
    plan_.programs = in_.list([&] { return read_nested(in_.bytes(), depth_ + 1); });
    if (!in_.done()) fail("words are left over");
    return std::move(plan_);
  }

  // --- what read_instr() asks for, by the kinds of fields
  SlotId slot() { return in_.id(0, static_cast<int64_t>(plan_.slots.size()), "slot"); }
  ExprId expr() { return in_.id(0, static_cast<int64_t>(plan_.exprs.size()), "expression"); }
  int32_t symbol() { return in_.id(0, static_cast<int64_t>(plan_.symbols.size()), "symbol"); }
  int32_t kernel() { return in_.id(0, static_cast<int64_t>(plan_.kernels.size()), "kernel"); }
  int32_t constant() { return in_.id(0, plan_.n_constants, "constant"); }
  int32_t callable() { return in_.id(0, plan_.n_callables, "callable"); }
  std::string string() { return in_.string(); }
  int64_t word() { return in_.word(); }
  bool flag() { return in_.flag(); }
  DType dtype() { return in_.one_of<DType>("dtype"); }
  Check::Error error() { return in_.one_of<Check::Error>("kind of error"); }
  ControlKind control() { return in_.one_of<ControlKind>("kind of control flow"); }
  std::vector<int32_t> programs() {
    return in_.list([&] { return in_.id(0, INT32_MAX, "subprogram"); });
  }
  std::vector<Check> checks() {
    return in_.list([&] { return Check{error(), in_.string()}; });
  }

  Shape shape() {
    Shape s;
    const int32_t rank = in_.id(0, kMaxRank + 1, "rank");
    for (int32_t i = 0; i < rank; ++i) s.sizes.push_back(expr());
    for (int32_t i = 0; i < rank; ++i) s.strides.push_back(expr());
    return s;
  }
  std::vector<ExprId> exprs() {
    return in_.list([&] { return expr(); });
  }
  std::vector<SlotId> slots() {
    return in_.list([&] { return slot(); });
  }

  Operand operand(int depth = 0) {
    if (depth > kMaxNesting) fail("operands are nested too deeply");
    Operand o{in_.one_of<Operand::Kind>("operand kind")};
    switch (o.kind) {
      case Operand::Kind::ref:
      case Operand::Kind::value: o.id = slot(); break;
      case Operand::Kind::size: o.id = expr(); break;
      case Operand::Kind::none: break;
      case Operand::Kind::boolean: o.id = in_.flag(); break;
      case Operand::Kind::real: o.re = real(); break;
      case Operand::Kind::complex:
        o.re = real();
        o.im = real();
        break;
      case Operand::Kind::dtype: o.id = static_cast<int32_t>(dtype()); break;
      case Operand::Kind::string:
      case Operand::Kind::device:
      case Operand::Kind::layout:
      case Operand::Kind::memory_format: o.text = in_.string(); break;
      case Operand::Kind::list: o.items = in_.list([&] { return operand(depth + 1); }); break;
    }
    return o;
  }
  std::vector<Operand> operands() {
    return in_.list([&] { return operand(); });
  }
  std::vector<KeywordOperand> keywords() {
    return in_.list([&] { return KeywordOperand{in_.string(), operand()}; });
  }
  std::vector<Result> results() {
    return in_.list([&] {
      Result r{in_.one_of<Result::Kind>("result kind"), kNone};
      if (r.kind == Result::Kind::tensor) r.id = slot();
      if (r.kind == Result::Kind::symbol) r.id = symbol();
      return r;
    });
  }

  Source source() {
    Source s{in_.one_of<Source::Kind>("symbol source")};
    if (s.kind == Source::Kind::expr) {
      s.expr = expr();
    } else {
      s.tensor = slot();
      s.dim = in_.id(0, kMaxRank, "dimension");
    }
    return s;
  }

 private:
  void parse_exprs() {
    const size_t n = in_.count();
    plan_.exprs.reserve(n);
    std::vector<int64_t> symbol_uses;
    for (size_t i = 0; i < n; ++i) {
      constexpr int64_t n_ops = kCount<ExprOp> + kSizeFunctions;
      ExprNode e{static_cast<ExprOp>(in_.id(0, n_ops, "expression operator"))};
      e.a = in_.word();
      e.b = in_.word();
      const int64_t limit = static_cast<int64_t>(i);
      if (e.op == ExprNode::Op::symbol) {
        symbol_uses.push_back(e.a);
      } else if (e.op != ExprNode::Op::constant &&
                 (e.a < 0 || e.a >= limit || e.b < 0 || e.b >= limit)) {
        fail("an expression refers to a later one");
      }
      plan_.exprs.push_back(e);
    }
    symbols_after_exprs_ = in_.count();
    for (int64_t s : symbol_uses)
      if (s < 0 || s >= static_cast<int64_t>(symbols_after_exprs_))
        fail("an expression names a symbol that does not exist");
  }

  double real() {
    const int64_t bits = in_.word();
    double value = 0;
    std::memcpy(&value, &bits, 8);
    return value;
  }
  Input input() {
    Input i{in_.one_of<Input::Kind>("input kind"), 0};
    i.id = i.kind == Input::Kind::symbol ? symbol() : slot();
    if (i.kind != Input::Kind::tensor) return i;
    i.dtype = plan_.slots[static_cast<size_t>(i.id)].dtype;
    i.shape = shape();
    i.device = in_.string();
    return i;
  }

  Reader in_;
  int depth_;
  Plan plan_;
  size_t symbols_after_exprs_ = 0;
};

}  // namespace

bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) -> uint32_t {
      return i + k < text.size() ? static_cast<uint8_t>(text[i + k]) : 0;
    };
    const uint32_t first = byte(0);
    const size_t n = first < 0x80       ? 1
                     : first >> 5 == 6  ? 2
                     : first >> 4 == 14 ? 3
                     : first >> 3 == 30 ? 4
                                        : 0;
    if (n == 0) return false;
    uint32_t code = n == 1 ? first : first & (0x7Fu >> n);
    for (size_t k = 1; k < n; ++k) {
      if (byte(k) >> 6 != 2) return false;
      code = code << 6 | (byte(k) & 0x3F);
    }
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kLeast[n] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return false;
    i += n;
  }
  return true;
}

namespace {

Plan read_nested(std::span<const std::byte> bytes, int depth) {
  if (depth > kMaxProgramNesting) fail("programs are nested too deeply");
  if (bytes.size() < kHeaderBytes || std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0)
    fail("it does not start with the magic bytes");
  uint32_t version = 0, crc = 0;
  uint64_t length = 0;
  std::memcpy(&version, bytes.data() + 8, 4);
  std::memcpy(&crc, bytes.data() + 12, 4);
  std::memcpy(&length, bytes.data() + 16, 8);
  if (version != kPlanVersion)
    throw PlanError("plan of version " + std::to_string(version) + ", this build reads version " +
                    std::to_string(kPlanVersion));
  const auto payload = bytes.subspan(kHeaderBytes);
  if (length != payload.size())
    fail("it has " + std::to_string(payload.size()) + " bytes of payload and promises " +
         std::to_string(length));
  if (crc != crc32(payload)) fail("the checksum is wrong");
  Plan plan = Parser(payload, depth).parse();
  verify(plan);
  return plan;
}

}  // namespace

Plan read_plan(std::span<const std::byte> bytes) { return read_nested(bytes, 0); }

bool evaluate(const ExprNode& node, const int64_t* values, int64_t& out) {
  using Op = ExprNode::Op;
  if (node.op == Op::constant) return out = node.a, true;
  if (node.op == Op::symbol) return false;  // read from where the symbol is defined, never computed
  const int64_t a = values[node.a], b = values[node.b];
  switch (node.op) {
    case Op::add: return !__builtin_add_overflow(a, b, &out);
    case Op::mul: return !__builtin_mul_overflow(a, b, &out);
    case Op::floordiv:
      if (b <= 0) return false;
      out = a / b - (a % b < 0);
      return true;
    case Op::mod:
      if (b <= 0) return false;
      out = a % b + (a % b < 0 ? b : 0);
      return true;
    case Op::min: return out = a < b ? a : b, true;
    case Op::max: return out = a > b ? a : b, true;
    case Op::eq: return out = a == b, true;
    case Op::ne: return out = a != b, true;
    case Op::lt: return out = a < b, true;
    case Op::le: return out = a <= b, true;
    default: return size_function(static_cast<int64_t>(node.op) - kCount<ExprOp>, a, b, out);
  }
}

}  // namespace plait
