// native/core/package.cpp: the bytes of a package, which plait/wrapper/package.py writes.
//
// All numbers are little-endian.
//   0   8 bytes "PLAITPKG", u32 version, u32 number of sections, u64 bytes of the file,
//       u64 checksum of the 24 bytes before it and of the table
// then the sections in the order of the table, and the table, each at the next multiple of 4096;
// what lies between is zero. The table has 80 bytes a section: name (48 bytes, ASCII and then
// NULs), u64 offset, u64 bytes, u64 checksum, u64 0. So every byte of a file is checked. Sections:
// `manifest`; `python`, JSON for plait.load; `weights`, raw bytes; and what the variants in the
// manifest name: plans, kernels (shared objects), cubins (see cubins.cpp).
//
// The manifest is a sequence of i64 words and of texts (a word with their bytes, then UTF-8); lists
// start with their number of items:
//   versions: (program, version) each
//   the program's name; `single`
//   math: names of the functions that kernels are given addresses of
//   storages: (offset in `weights`, a multiple of 64; bytes; device) each
//   weights, constants: (name, storage, dtype, offset in elements, rank, sizes, strides) each
//   folded: names of weights that were put into others
//   routines: (plan, number of its first constant, controls) each
//   controls: what the program calls in the place of Python: (0 call | 1 cond | 2 loop | 3 scan,
//             numbers of routines, operands: (0 of the call | 1 constant, number | value) each,
//             number of carried and of scanned operands, results: () or (strides) each) each
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
//
// The checksum: blocks of 32 bytes, the last one filled with zeros, go into four lanes of 64 bits,
// which start as 1, 2, 3, 4, word by word: lane = rotl(lane ^ word, 29) * P. At the end h = number
// of bytes; h = rotl(h ^ lane, 29) * P for each lane, then h ^= h >> 32, h *= P, h ^= h >> 29.
// Every step can be undone, so damage within one word is always found.
#include "core/package.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

namespace plait {
namespace {

constexpr char kMagic[8] = {'P', 'L', 'A', 'I', 'T', 'P', 'K', 'G'};
constexpr uint64_t kHeaderBytes = 32, kEntryBytes = 80, kNameBytes = 48, kPage = 4096;
constexpr size_t kChunk = 1 << 20;
constexpr int64_t kMaxRank = 64;
constexpr uint64_t kPrime = 0x9E3779B97F4A7C15u;

uint64_t stir(uint64_t lane, uint64_t word) {
  const uint64_t x = lane ^ word;
  return (x << 29 | x >> 35) * kPrime;
}

uint64_t next_page(uint64_t offset) { return (offset + kPage - 1) / kPage * kPage; }

template <class T>
T number(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// The words and texts of a manifest.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  [[noreturn]] static void fail(const std::string& what) {
    throw PackageError("damaged section 'manifest': " + what);
  }
  int64_t word() {
    if (bytes_.size() < 8) fail("it ends too early");
    const auto value = number<int64_t>(bytes_, 0);
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
    m_.routines = in_.list([&] {
      Manifest::Routine r{in_.text(), index(m_.constants.size() + 1, "constant"), controls()};
      ++n_routines_;
      return r;
    });
    m_.controls = controls();
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

  std::vector<Manifest::Control> controls() {
    using Control = Manifest::Control;
    const auto numbers = [&] { return in_.list([&] { return in_.word(); }); };
    return in_.list([&] {
      const auto kind = static_cast<Control::Kind>(in_.id(0, 4, "kind of control flow"));
      Control c{kind, in_.list([&] { return index(n_routines_, "routine"); }),
                in_.list([&] { return Control::Given{in_.flag(), in_.word()}; })};
      const auto n = static_cast<int64_t>(c.operands.size());
      for (const Control::Given& g : c.operands)
        if (!g.constant && g.value < 0) Reader::fail("an operand is out of range");
      if (kind == Control::Kind::cond && n == 0) Reader::fail("a condition is missing");
      c.n_carried = in_.id(0, n + 1, "number of operands");
      c.n_scanned = in_.id(0, n + 1, "number of operands");
      c.strides = in_.list([&]() -> std::optional<std::vector<int64_t>> {
        if (!in_.flag()) return {};
        return numbers();
      });
      return c;
    });
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
      ExprNode e{static_cast<ExprNode::Op>(in_.id(0, 12, "expression operator"))};
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
  size_t n_routines_ = 0;  // read by now
  int64_t next_position_ = 0;
  Manifest m_;
};

// Whether this CPU has the instructions of this name.
bool cpu_runs(const std::string& isa) {
  const bool common = __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == "portable") return true;
  if (isa == "avx2") return common && __builtin_cpu_supports("avx2");
  return isa == "avx512" && common && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

// sm_90 runs on that very architecture (from sm_90 on kernels use what is special to one), sm_80 on
// later ones of its generation too; ptx_80 on it and all later ones.
bool gpu_runs(const std::string& gpu, int capability) {
  const int made_for = std::atoi(gpu.c_str() + gpu.find('_') + 1);
  if (gpu.starts_with("ptx_")) return capability >= made_for;
  return capability == made_for ||
         (made_for < 90 && capability > made_for && capability / 10 == made_for / 10);
}

bool is_gpu(const std::string& name) { return name.starts_with("sm_") || name.starts_with("ptx_"); }

// The parts of a machine's name: "avx2+sm_90".
std::vector<std::string> parts_of(const std::string& machine) {
  std::vector<std::string> parts(1);
  for (char c : machine)
    if (c == '+')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

}  // namespace

void Checksum::add(std::span<const std::byte> bytes) {
  n_bytes_ += bytes.size();
  uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
  const auto block = [&](const std::byte* at) {
    uint64_t words[4];
    std::memcpy(words, at, kBlock);
    a = stir(a, words[0]);
    b = stir(b, words[1]);
    c = stir(c, words[2]);
    d = stir(d, words[3]);
  };
  for (; bytes.size() >= kBlock; bytes = bytes.subspan(kBlock)) block(bytes.data());
  if (!bytes.empty()) {
    std::byte last[kBlock] = {};
    std::memcpy(last, bytes.data(), bytes.size());
    block(last);
  }
  lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
}

void Checksum::align() {
  constexpr std::byte zeros[kBlock] = {};
  n_bytes_ = (n_bytes_ + kBlock - 1) / kBlock * kBlock;  // add() has filled the last one
  while (n_bytes_ % kWeightAlign != 0) add(zeros);
}

uint64_t Checksum::value() const {
  uint64_t h = n_bytes_;
  for (const uint64_t lane : lanes_) h = stir(h, lane);
  h ^= h >> 32;
  h *= kPrime;
  return h ^ h >> 29;
}

uint64_t checksum(std::span<const std::byte> bytes) {
  Checksum c;
  c.add(bytes);
  return c.value();
}

Manifest read_manifest(std::span<const std::byte> bytes, uint64_t n_weight_bytes) {
  return ManifestParser(bytes, n_weight_bytes).parse();
}

// ---------------------------------------------------------------------------------------- the file
Mapping::Mapping(int file, uint64_t offset, size_t nbytes) : nbytes_(nbytes) {
  if (nbytes == 0) return;
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file,
                    static_cast<off_t>(offset));
  if (data == MAP_FAILED)
    throw PackageError(std::string("cannot map the weights: ") + std::strerror(errno));
  data_ = static_cast<char*>(data);
}
Mapping::~Mapping() {
  if (data_) munmap(data_, nbytes_);
}

PackageFile::PackageFile(const std::string& path, bool verify_weights) : path_(path) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file_ < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  try {
    read_table();
    read_sections(verify_weights);
    uint64_t n_weight_bytes = 0;
    for (const Section& s : sections_)
      if (s.name == "weights") n_weight_bytes = s.nbytes;
    try {
      manifest_ = read_manifest(section("manifest"), n_weight_bytes);
    } catch (const PackageError& e) {
      fail(e.what());
    }
    section("python");
    for (const Manifest::Routine& r : manifest_.routines) section(r.plan);
    for (const Manifest::Variant& v : manifest_.variants)
      for (const std::string* name : {&v.plan, &v.kernels, &v.cubins})
        if (!name->empty() || name == &v.plan) section(*name);
  } catch (...) {
    close(file_);
    throw;
  }
}
PackageFile::~PackageFile() { close(file_); }

void PackageFile::fail(const std::string& what) const { throw PackageError(path_ + ": " + what); }

void PackageFile::read(uint64_t offset, std::span<std::byte> into) {
  while (!into.empty()) {
    const ssize_t n = pread(file_, into.data(), into.size(), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail(std::string("cannot be read: ") + std::strerror(errno));
    if (n == 0) fail("truncated while it was read");
    into = into.subspan(static_cast<size_t>(n));
    offset += static_cast<uint64_t>(n);
  }
}

void PackageFile::read_table() {
  struct stat facts;
  if (fstat(file_, &facts) != 0 || !S_ISREG(facts.st_mode)) fail("not a package: it is no file");
  const auto have = static_cast<uint64_t>(facts.st_size);
  std::vector<std::byte> head(std::min(have, kHeaderBytes));
  read(0, head);
  if (have < sizeof kMagic || std::memcmp(head.data(), kMagic, sizeof kMagic) != 0)
    fail("not a package of plait");
  if (have < kHeaderBytes) fail("truncated within its header");
  if (const auto version = number<uint32_t>(head, 8); version != kPackageVersion)
    fail("wrong version: a package of version " + std::to_string(version) +
         ", this build reads version " + std::to_string(kPackageVersion));
  const auto n_sections = number<uint32_t>(head, 12);
  size_ = number<uint64_t>(head, 16);
  const auto truncated = [&] {
    fail("truncated: it has " + std::to_string(have) + " of " + std::to_string(size_) + " bytes");
  };
  if (have < size_) truncated();
  const uint64_t table_bytes = kEntryBytes * n_sections;
  if (size_ < kHeaderBytes || table_bytes > size_ - kHeaderBytes) fail("damaged header");
  table_ = size_ - table_bytes;
  const auto promised = number<uint64_t>(head, 24);
  head.resize(24);
  head.resize(24 + table_bytes);
  const auto table = std::span(head).subspan(24);
  read(table_, table);
  if (checksum(head) != promised) fail("damaged header");
  uint64_t at = kHeaderBytes;
  std::set<std::string> names;
  for (uint32_t k = 0; k < n_sections; ++k) {
    const auto entry = table.subspan(k * kEntryBytes, kEntryBytes);
    const char* name = reinterpret_cast<const char*>(entry.data());
    const size_t length = strnlen(name, kNameBytes);
    Section s{std::string(name, length),
              number<uint64_t>(entry, 48),
              number<uint64_t>(entry, 56),
              number<uint64_t>(entry, 64),
              {}};
    const bool padded =
        std::all_of(name + length, name + kNameBytes, [](char c) { return c == 0; });
    if (!padded || length == 0 || number<uint64_t>(entry, 72) != 0 ||
        !names.insert(s.name).second || s.offset != next_page(at) || s.offset > size_ ||
        s.nbytes > size_ - s.offset)
      fail("damaged header: section " + std::to_string(k));
    at = s.offset + s.nbytes;
    sections_.push_back(std::move(s));
  }
  if (next_page(at) != table_ || have != size_) fail("damaged: bytes follow its last section");
}

void PackageFile::read_sections(bool verify_weights) {
  uint64_t end = kHeaderBytes;
  for (Section& s : sections_) {
    require_zeros(end, s.offset);
    end = s.offset + s.nbytes;
    const bool kept = s.name != "weights";
    if (!kept && !verify_weights) continue;
    if (kept) s.bytes.resize(s.nbytes);
    std::vector<std::byte> room(kept ? 0 : std::min<uint64_t>(s.nbytes, kChunk));
    Checksum sum;
    for (uint64_t done = 0; done < s.nbytes; done += kChunk) {
      const auto n = static_cast<size_t>(std::min<uint64_t>(kChunk, s.nbytes - done));
      const std::span<std::byte> chunk =
          kept ? std::span(s.bytes).subspan(done, n) : std::span(room).first(n);
      read(s.offset + done, chunk);
      sum.add(chunk);
    }
    if (sum.value() != s.checksum) fail("damaged section '" + s.name + "': its checksum is wrong");
  }
  require_zeros(end, table_);
}

void PackageFile::require_zeros(uint64_t first, uint64_t last) {
  std::byte room[kPage];
  const auto between = std::span(room).first(last - first);
  read(first, between);
  if (std::any_of(between.begin(), between.end(), [](std::byte b) { return b != std::byte{}; }))
    fail("damaged between its sections");
}

std::span<const std::byte> PackageFile::section(const std::string& name) const {
  for (const Section& s : sections_)
    if (s.name == name && name != "weights") return s.bytes;
  fail("damaged: there is no section '" + name + "'");
}

std::shared_ptr<Mapping> PackageFile::map_weights() const {
  for (const Section& s : sections_)
    if (s.name == "weights") return std::make_shared<Mapping>(file_, s.offset, s.nbytes);
  return std::make_shared<Mapping>(file_, 0, 0);
}

bool Manifest::wants_gpu() const {
  for (const Variant& v : variants)
    for (const std::string& part : parts_of(v.machine))
      if (is_gpu(part)) return true;
  return false;
}

const Manifest::Variant& choose_variant(const PackageFile& file, const std::string& wanted,
                                        int capability) {
  std::string have, lacking;
  for (const Manifest::Variant& v : file.manifest().variants) {
    have += (have.empty() ? "" : ", ") + v.machine;
    if (!wanted.empty() && v.machine != wanted) continue;
    std::string lacks;
    for (const std::string& part : parts_of(v.machine)) {
      if (is_gpu(part) ? gpu_runs(part, capability) : cpu_runs(part)) continue;
      lacks = !is_gpu(part)     ? "this CPU lacks " + part
              : capability == 0 ? "there is no GPU here that torch can use"
                                : "no kernels for this GPU (sm_" + std::to_string(capability) + ")";
    }
    if (lacks.empty()) return v;
    lacking = lacks;
  }
  if (lacking.empty()) lacking = "it has nothing for the machine '" + wanted + "'";
  file.fail(lacking + "; the package is for " + have);
}

}  // namespace plait
