// native/core/package.cpp: the bytes of a package, which plait/wrapper/package.py writes.
//
// All numbers are little-endian.
//   0   8 bytes "PLAITPKG", u32 version, u32 number of sections, u64 bytes of the file,
//       u64 checksum of the 24 bytes before it and of the table
// then the sections in the order of the table, and the table, each at the next multiple of 4096;
// what lies between is zero. The table has 80 bytes a section: name (48 bytes, ASCII and then
// NULs), u64 offset, u64 bytes, u64 checksum, u64 0. So every byte of a file is checked. Sections:
// `manifest` (see manifest.cpp); `python`, JSON for plait.load; `weights`, raw bytes, whose
// checksum is that of the checksums of their pieces of 1 MiB, so that threads can share the work;
// and what the variants in the manifest name: plans, kernels (shared objects), cubins (see
// cubins.cpp).
#include "core/package.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>

#include "core/checksum.h"
#include "core/cuda.h"

namespace plait {
namespace {

constexpr char kMagic[8] = {'P', 'L', 'A', 'I', 'T', 'P', 'K', 'G'};
constexpr uint64_t kHeaderBytes = 32, kEntryBytes = 80, kNameBytes = 48, kPage = 4096;

uint64_t next_page(uint64_t offset) { return (offset + kPage - 1) / kPage * kPage; }

template <class T>
T number(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// Whether this CPU has the instructions of this name.
bool cpu_runs(const std::string& isa) {
  const bool common = __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (isa == "portable") return true;
  if (isa == "avx2") return common && __builtin_cpu_supports("avx2");
  return isa == "avx512" && common && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
}

// The maker of the GPU that a part of a machine's name is; null: it is a CPU.
const cuda::Maker* maker_of(const std::string& part) {
  for (const cuda::Maker* maker : cuda::kMakers)
    for (const char* begin : maker->gpus)
      if (part.starts_with(begin)) return maker;
  return nullptr;
}

bool runs(const std::string& part, const std::string& gpu) {
  const cuda::Maker* maker = maker_of(part);
  return maker ? part == gpu || maker->runs(part, gpu) : cpu_runs(part);
}

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

Weights::Weights(const std::string& path, int file, uint64_t offset, size_t nbytes,
                 uint64_t checksum)
    : path_(path), nbytes_(nbytes), checksum_(checksum) {
  if (nbytes == 0) return;
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, file,
                    static_cast<off_t>(offset));
  if (data == MAP_FAILED)
    throw PackageError(path_ + ": cannot map the weights: " + std::strerror(errno));
  data_ = static_cast<char*>(data);
}
Weights::~Weights() {
  if (data_) munmap(data_, nbytes_);
}

// Reads a piece into memory, or returns the error that its use would end the process with. Kernels
// before 5.14 do not know.
int Weights::read_ahead(std::span<std::byte> piece) const {
#ifdef MADV_POPULATE_READ
  while (madvise(piece.data(), piece.size(), MADV_POPULATE_READ) != 0)
    if (errno != EINTR && errno != EAGAIN) return errno == EINVAL ? 0 : errno;
#endif
  return 0;
}

void Weights::verify(ForEach for_each) {
  const std::lock_guard lock(verifying_);
  if (verified_) return;
  constexpr size_t kPiece = PiecewiseChecksum::kPiece;
  const std::span all(reinterpret_cast<std::byte*>(data_), nbytes_);
  std::vector<uint64_t> sums((nbytes_ + kPiece - 1) / kPiece);
  std::atomic<int> error = 0;
  for_each(sums.size(), [&](size_t k) {
    const auto piece = all.subspan(k * kPiece, std::min(kPiece, nbytes_ - k * kPiece));
    if (const int why = read_ahead(piece))
      error = why;
    else
      sums[k] = checksum(piece);
  });
  if (error == EFAULT) throw PackageError(path_ + ": the weights were cut off since it was opened");
  if (error != 0)
    throw PackageError(path_ + ": the weights cannot be read: " + std::strerror(error));
  if (PiecewiseChecksum::combined(sums) != checksum_)
    throw PackageError(path_ + ": damaged section 'weights': its checksum is wrong");
  verified_ = true;
}

PackageFile::PackageFile(const std::string& path) : path_(path) {
  file_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file_ < 0) fail(std::string("cannot be opened: ") + std::strerror(errno));
  try {
    read_table();
    read_sections();
    uint64_t n_weight_bytes = 0;
    for (const Section& s : sections_)
      if (s.name == "weights") n_weight_bytes = s.nbytes;
    try {
      manifest_ = read_manifest(section("manifest"), n_weight_bytes);
    } catch (const PackageError& e) {
      fail(e.what());
    }
    section("python");
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

void PackageFile::read_sections() {
  uint64_t end = kHeaderBytes;
  for (Section& s : sections_) {
    require_zeros(end, s.offset);
    end = s.offset + s.nbytes;
    if (s.name == "weights") continue;
    s.bytes.resize(s.nbytes);
    read(s.offset, s.bytes);
    if (checksum(s.bytes) != s.checksum)
      fail("damaged section '" + s.name + "': its checksum is wrong");
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

std::shared_ptr<Weights> PackageFile::map_weights() const {
  for (const Section& s : sections_)
    if (s.name == "weights")
      return std::make_shared<Weights>(path_, file_, s.offset, s.nbytes, s.checksum);
  fail("damaged: there is no section 'weights'");
}

bool Manifest::wants_gpu() const {
  for (const Variant& v : variants)
    for (const std::string& part : parts_of(v.machine))
      if (maker_of(part)) return true;
  return false;
}

const Manifest::Variant& choose_variant(const PackageFile& file, const std::string& wanted,
                                        const std::string& gpu) {
  std::string have, lacking;
  for (const Manifest::Variant& v : file.manifest().variants) {
    have += (have.empty() ? "" : ", ") + v.machine;
    if (!wanted.empty() && v.machine != wanted) continue;
    std::string lacks;
    for (const std::string& part : parts_of(v.machine)) {
      if (runs(part, gpu)) continue;
      lacks = !maker_of(part) ? "this CPU lacks " + part
              : gpu.empty()   ? "there is no GPU here that torch can use"
                              : "no kernels for this GPU (" + gpu + ")";
    }
    if (lacks.empty()) return v;
    lacking = lacks;
  }
  if (lacking.empty()) lacking = "it has nothing for the machine '" + wanted + "'";
  file.fail(lacking + "; the package is for " + have);
}

}  // namespace plait
