// native/core/cuda.cpp: the machine's driver, and kernels made of compiled images.
#include "core/cuda.h"

#include <dlfcn.h>

#include <algorithm>
#include <ranges>

namespace plait::cuda {
namespace {
enum FunctionAttribute : int {
  kStaticShared = 1,
  kMaxDynamicShared = 8,
  kCarveout = 9,
  kNonPortableCluster = 14,
};
constexpr int kMaxSharedOptIn = 97;  // a device attribute
constexpr uint32_t kSharedWithoutOptIn = 48 << 10;
constexpr uint64_t kMaxGrid = (uint64_t{1} << 31) - 1;
constexpr uint32_t kMaxWarps = 1024;  // no device has so many; a warp's lanes times it is a number
constexpr uint32_t kPortableCluster = 8;
constexpr int kSpread = 1;  // a cluster scheduling policy
constexpr size_t kScratchPointers = 2;
constexpr int kNoDriver = 100, kInvalidValue = 1;

const char* machine_library() {
  for (const Maker* maker : kMakers)
    for (const char* name : maker->libraries)
      if (dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return name;
  for (const Maker* maker : std::views::reverse(kMakers))
    for (const char* name : maker->libraries)
      if (dlopen(name, RTLD_NOW)) return name;
  return kNvidia.libraries.front();
}
}  // namespace

Driver::Driver(const char* library) {
  // Stays open: kernels use it to the end.
  library_ = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!library_) throw DriverError(kNoDriver, std::string("no CUDA driver: ") + dlerror());
  const auto made_it = [&](const Maker* maker) { return symbol(maker->mark) != nullptr; };
  const auto maker = std::ranges::find_if(kMakers, made_it);
  (maker == std::end(kMakers) ? kNvidia : **maker).find_entries(*this);
  check(init(0), "cuInit");
}

const Driver& Driver::machine() {
  static const Driver driver(machine_library());
  return driver;
}

void* Driver::symbol(const char* name) const { return dlsym(library_, name); }

void Driver::lacks(const char* name) const {
  throw DriverError(kNoDriver, std::string("the CUDA driver has no ") + name +
                                   "; it is older than what plait needs");
}

void Driver::fail(int code, std::string_view what) const {
  const char* text = nullptr;
  error_string(code, &text);
  throw DriverError(code, std::string(what) + ": " + (text ? text : "unknown CUDA error") + " (" +
                              std::to_string(code) + ")");
}

Kernel::Kernel(const Driver& driver, const void* image, const KernelFacts& facts,
               size_t n_arguments)
    : driver_(driver),
      facts_(facts),
      symbol_(facts.symbol),
      num_ctas_(facts.num_ctas),
      max_grid_(kMaxGrid / std::max(facts.num_ctas, 1u)),
      n_parameters_(n_arguments + kScratchPointers) {
  if (facts.num_ctas == 0 || facts.num_warps == 0 || facts.num_warps > kMaxWarps)
    throw std::runtime_error(symbol_ + ": " + std::to_string(facts.num_ctas) + " blocks of " +
                             std::to_string(facts.num_warps) + " warps are no kernel's facts");
  int lanes = 0;
  driver_.check(driver_.load_module(&module_, image), symbol_);
  try {
    driver_.check(driver_.function(&function_, module_, symbol_.c_str()), symbol_);
    check_parameters();
    prepare_shared(facts.shared);
    prepare_attributes();
    driver_.check(driver_.lanes_of_warp(&lanes), symbol_);
  } catch (...) {
    driver_.unload_module(module_);
    throw;
  }
  config_ = {.grid_x = 0,
             .grid_y = 1,
             .grid_z = 1,
             .block_x = static_cast<uint32_t>(lanes) * facts.num_warps,
             .block_y = 1,
             .block_z = 1,
             .shared = facts.shared,
             .stream = nullptr,
             .attributes = attributes_.empty() ? nullptr : attributes_.data(),
             .n_attributes = static_cast<uint32_t>(attributes_.size())};
}

NodeParams Kernel::node_of(const Config& c, void** parameters) const {
  return {.function = function_,
          .grid_x = c.grid_x,
          .grid_y = c.grid_y,
          .grid_z = c.grid_z,
          .block_x = c.block_x,
          .block_y = 1,
          .block_z = 1,
          .shared = c.shared,
          .parameters = parameters,
          .extra = nullptr,
          .kernel = nullptr,
          .context = nullptr};
}

void Kernel::set_node(GraphExec graph, GraphNode node, uint64_t grid, void** parameters) const {
  const NodeParams params = node_of(config_of(grid), parameters);
  driver_.check(driver_.set_node(graph, node, &params), symbol_);
}

// Fails when the context is gone: nothing to do.
Kernel::~Kernel() { driver_.unload_module(module_); }

void Kernel::prepare_shared(uint32_t bytes) {
  if (bytes <= kSharedWithoutOptIn) return;
  int device = 0, most = 0, fixed = 0;
  driver_.check(driver_.current_device(&device), symbol_);
  driver_.check(driver_.device_attribute(&most, kMaxSharedOptIn, device), symbol_);
  driver_.check(driver_.function_attribute(&fixed, kStaticShared, function_), symbol_);
  if (static_cast<int64_t>(bytes) + fixed > most)
    throw OutOfResources(symbol_ + ": needs " + std::to_string(bytes + fixed) +
                         " bytes of shared memory, the device has " + std::to_string(most));
  driver_.check(driver_.set_function_attribute(function_, kCarveout, 100), symbol_);
  driver_.check(driver_.set_function_attribute(function_, kMaxDynamicShared, most - fixed),
                symbol_);
}

void Kernel::prepare_attributes() {
  if (facts_.pdl && driver_.records_early)
    attributes_.push_back({Attribute::serialization, 0, {1}});
  if (facts_.cooperative) attributes_.push_back({Attribute::cooperative, 0, {1}});
  if (num_ctas_ == 1) return;
  attributes_.push_back({Attribute::cluster_dimension, 0, {num_ctas_, 1, 1}});
  attributes_.push_back({Attribute::cluster_policy, 0, {kSpread}});
  if (num_ctas_ > kPortableCluster)
    driver_.check(driver_.set_function_attribute(function_, kNonPortableCluster, 1), symbol_);
}

// A Triton that changed its calling convention is found here, not by wrong numbers.
void Kernel::check_parameters() const {
  if (!driver_.parameter) return;
  size_t offset = 0, bytes = 0;
  const int last = driver_.parameter(function_, n_parameters_ - 1, &offset, &bytes);
  const int beyond = driver_.parameter(function_, n_parameters_, &offset, &bytes);
  if (last == 0 && beyond == kInvalidValue) return;
  throw std::runtime_error(symbol_ + ": the compiled kernel has not the " +
                           std::to_string(n_parameters_) +
                           " parameters that plait launches it with");
}

size_t Kernel::parameter_nbytes(size_t index) const {
  size_t offset = 0, bytes = 0;
  if (driver_.parameter)
    driver_.check(driver_.parameter(function_, index, &offset, &bytes), symbol_);
  return bytes;
}

void Kernel::too_large(uint64_t x, uint64_t y, uint64_t z) const {
  std::string grid = std::to_string(x);
  if (y != 1 || z != 1) grid += " x " + std::to_string(y) + " x " + std::to_string(z);
  throw std::runtime_error(symbol_ + ": a grid of " + grid +
                           " programs is more than the device takes");
}

}  // namespace plait::cuda
