// native/core/cubins.cpp: reads a pack of cubins.
//
// Layout, little-endian: 8 bytes magic "PLAITCUB", i64 version, i64 number of kernels; then for
// each the words (bytes of name, bytes of symbol, bytes of image, num_warps, num_ctas, shared,
// global scratch and its alignment, profile scratch and its alignment, cooperative, pdl), the name,
// the symbol and the image; then an i64 number of texts and for each the bytes of name and text,
// name, text.
#include "core/cubins.h"

#include <cstring>
#include <mutex>
#include <tuple>

#include "core/files.h"
#include "core/plan.h"

namespace plait {
namespace {
constexpr char kMagic[8] = {'P', 'L', 'A', 'I', 'T', 'C', 'U', 'B'};
constexpr int64_t kVersion = 2;
constexpr int kWords = 12;

class Bytes {
 public:
  Bytes(const std::string& data, const std::string& path) : data_(data), path_(path) {}
  std::string take(int64_t n) {
    if (n < 0 || static_cast<uint64_t>(n) > data_.size() - at_)
      throw LoadError("damaged kernel file " + path_);
    at_ += static_cast<size_t>(n);
    return data_.substr(at_ - static_cast<size_t>(n), static_cast<size_t>(n));
  }
  int64_t word() {
    int64_t value = 0;
    std::memcpy(&value, take(8).data(), 8);
    return value;
  }

 private:
  const std::string& data_;
  const std::string& path_;
  size_t at_ = 0;
};

}  // namespace

Cubins Cubins::read(const std::string& path) {
  const std::optional<std::string> all = files::read_regular(path);
  if (!all) throw LoadError("cannot read kernel file " + path);
  return {*all, path};
}

Cubins::Cubins(const std::string& data, const std::string& path) : path_(path) {
  Bytes in(data, path_);
  if (in.take(8) != std::string(kMagic, 8) || in.word() != kVersion)
    throw LoadError(path_ + " is no kernel file of this version");
  for (int64_t n = in.word(); n > 0; --n) {
    int64_t w[kWords];
    for (int64_t& value : w) value = in.word();
    const std::string name = in.take(w[0]);
    Entry& e = entries_[name];
    e.facts = {.symbol = in.take(w[1]),
               .num_warps = static_cast<uint32_t>(w[3]),
               .num_ctas = static_cast<uint32_t>(w[4]),
               .shared = static_cast<uint32_t>(w[5]),
               .global_scratch = w[6],
               .global_alignment = w[7],
               .profile_scratch = w[8],
               .profile_alignment = w[9],
               .cooperative = w[10] != 0,
               .pdl = w[11] != 0};
    e.image = in.take(w[2]);
  }
  for (int64_t n = in.word(); n > 0; --n) {
    const int64_t n_name = in.word(), n_text = in.word();
    const std::string name = in.take(n_name);
    texts_[name] = in.take(n_text);
  }
}

const Cubins::Entry* Cubins::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

const std::string* Cubins::text(const std::string& name) const {
  const auto found = texts_.find(name);
  return found == texts_.end() ? nullptr : &found->second;
}

const Cubins::Entry& Cubins::entry(const std::string& name) const {
  const Entry* found = find(name);
  if (!found) throw LoadError("kernel '" + name + "' is not in " + path_);
  return *found;
}

const cuda::Kernel* Cubins::share(const std::string& name, size_t n_arguments) const {
  using Key = std::tuple<void*, size_t, std::string, std::string>;  // context, ..., symbol, image
  static std::mutex mutex;
  static auto* all = new std::map<Key, std::unique_ptr<cuda::Kernel>>;  // outlives the driver
  const Entry& e = entry(name);
  void* context = nullptr;
  const cuda::Driver& driver = cuda::Driver::machine();
  driver.check(driver.current_context(&context), "cuCtxGetCurrent");
  const std::scoped_lock lock(mutex);
  std::unique_ptr<cuda::Kernel>& kernel = (*all)[{context, n_arguments, e.facts.symbol, e.image}];
  if (!kernel) kernel = load(name, n_arguments);
  return kernel.get();
}

std::unique_ptr<cuda::Kernel> Cubins::load(const std::string& name, size_t n_arguments) const {
  const Entry& e = entry(name);
  return std::make_unique<cuda::Kernel>(cuda::Driver::machine(), e.image.data(), e.facts,
                                        n_arguments);
}

}  // namespace plait
