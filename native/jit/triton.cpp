// native/jit/triton.cpp: from a call to a launch. What a hit does is launch(Sites&, Call) down to
// Record::launch; everything else happens once a key.
#include <alloca.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core/cuda.h"
#include "jit/specialize.h"

namespace plait::triton {
namespace {
constexpr int kMajor = 75, kMinor = 76;  // device attributes
constexpr uint64_t kMix = 0x9e3779b97f4a7c15;
std::atomic<const Hooks*> hooks{};
std::atomic<const Scratch*> scratch_memory{};

cuda::Stream of_driver(Stream stream) { return reinterpret_cast<cuda::Stream>(stream); }

bool is_empty(const Grid& grid) { return grid.x <= 0 || grid.y <= 0 || grid.z <= 0; }

// Whatever goes wrong below is told with the kernel's name.
template <class F>
decltype(auto) told(const std::string& kernel, const std::string& specialization, F f) {
  try {
    return f();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(error.what(), kernel, specialization);
  }
}

uint64_t current_context(const cuda::Driver& driver) {
  void* context = nullptr;
  driver.check(driver.current_context(&context), "cuCtxGetCurrent");
  return reinterpret_cast<uintptr_t>(context);
}

// A compiled kernel in one context.
struct Loaded {
  Loaded(const cuda::Driver& driver, const Binary& b, const Specialization& specialization)
      : kernel(driver, b.image.data(),
               {.symbol = b.symbol, .num_warps = b.num_warps, .num_ctas = b.num_ctas,
                .shared = b.shared, .global_scratch = b.global_scratch,
                .global_alignment = b.global_alignment, .profile_scratch = b.profile_scratch,
                .profile_alignment = b.profile_alignment, .cooperative = b.cooperative,
                .pdl = b.pdl},
               specialization.slots.size()) {
    for (size_t k = 0; k < specialization.slots.size(); ++k) {
      const size_t nbytes = kernel.parameter_nbytes(k);
      if (nbytes != 0 && nbytes != specialization.slots[k].nbytes)
        throw std::runtime_error("parameter " + std::to_string(k) + " of the compiled kernel has " +
                                 std::to_string(nbytes) + " bytes, its type " +
                                 std::to_string(specialization.slots[k].nbytes));
    }
  }
  cuda::Kernel kernel;
};

// One key that is being compiled, or is: whoever comes second waits for the first.
struct Flight {
  std::mutex mutex;
  std::string signature;
  std::optional<Binary> binary;
  std::map<uint64_t, std::unique_ptr<Loaded>> loaded;  // by context
};
}  // namespace

namespace detail {
// A Python function of a provider.
class Function {
 public:
  Function(std::shared_ptr<Provider> provider, std::string file, std::string name, size_t id)
      : provider(std::move(provider)), file(std::move(file)), name(std::move(name)), id(id) {}

  const Signature& signature() const {
    const std::scoped_lock lock(mutex_);
    if (!signature_) signature_.emplace(name, provider->describe(file, name));
    return *signature_;
  }
  Flight& flight(const std::string& key) const {
    const std::scoped_lock lock(mutex_);
    return flights_[key];
  }

  void list(std::vector<std::string>& signatures) const {
    const std::scoped_lock lock(mutex_);
    for (auto& [key, flight] : flights_) {
      const std::scoped_lock flying(flight.mutex);
      if (flight.binary) signatures.push_back(flight.signature);
    }
  }

  const std::shared_ptr<Provider> provider;
  const std::string file, name;
  const size_t id;

 private:
  mutable std::mutex mutex_;
  mutable std::optional<Signature> signature_;
  mutable std::map<std::string, Flight> flights_;
};

// What a call with one key launches.
struct Record {
  const Function* function;
  const Signature* signature;
  const cuda::Driver* driver;
  const cuda::Kernel* kernel = nullptr;
  Specialization specialization;
  std::vector<uint64_t> key;
  std::vector<std::string> strings;
  std::vector<uint32_t> offsets;          // of each parameter in the call's words, in bytes
  std::vector<uint32_t> defaults, fixes;  // slots that are not simply the call's
  bool plain = true;                      // there are none of them

  // Fills the addresses of the parameters; the words may change.
  void address(uint64_t* words, void** parameters) const {
    auto* base = reinterpret_cast<char*>(words);
    for (size_t k = 0; k < offsets.size(); ++k) parameters[k] = base + offsets[k];
    if (plain) [[likely]]
      return;
    for (const uint32_t k : defaults)
      parameters[k] = const_cast<uint64_t*>(&specialization.defaults[specialization.slots[k].word]);
    const auto* states = reinterpret_cast<const uint8_t*>(words + n_head_words);
    for (const uint32_t k : fixes) {
      const Slot& slot = specialization.slots[k];
      fix(slot, *signature, states[slot.leaf], reinterpret_cast<uint64_t*>(parameters[k]));
    }
  }

  cuda::Config config_of(const Grid& grid) const {
    return told(function->name, specialization.text, [&] {
      return kernel->config_of(static_cast<uint64_t>(grid.x), static_cast<uint64_t>(grid.y),
                               static_cast<uint64_t>(grid.z));
    });
  }

  // parameters: with room for the two pointers to scratch memory.
  void launch(const Grid& grid, cuda::Config& config, Stream stream, void** parameters) const {
    config.stream = of_driver(stream);
    const Hooks* hook = hooks.load(std::memory_order_acquire);
    const cuda::KernelFacts& facts = kernel->facts();
    void* memory[2] = {};
    const size_t n = offsets.size();
    parameters[n] = &memory[0];
    parameters[n + 1] = &memory[1];
    if (!hook && facts.global_scratch == 0 && facts.profile_scratch == 0) [[likely]]
      return enqueue(config, parameters);
    const Launched launched{function->name, facts.symbol, specialization.text, facts.num_warps,
                            facts.num_ctas, facts.shared, grid, stream};
    if (hook && hook->enter) hook->enter(hook->user, launched);
    const Memory global(*this, launched, facts.global_scratch, facts.global_alignment);
    const Memory profile(*this, launched, facts.profile_scratch, facts.profile_alignment);
    memory[0] = global.data;
    memory[1] = profile.data;
    enqueue(config, parameters);
    if (hook && hook->exit) hook->exit(hook->user, launched);
  }

 private:
  void enqueue(const cuda::Config& config, void** parameters) const {
    told(function->name, specialization.text, [&] { kernel->launch(config, parameters); });
  }

  // Scratch memory of one launch, freed in the stream's order behind it.
  struct Memory {
    Memory(const Record& r, const Launched& l, int64_t nbytes, int64_t alignment)
        : driver(*r.driver), stream(l.stream), user(scratch_memory.load(std::memory_order_acquire)) {
      if (nbytes == 0) return;
      const auto programs = static_cast<size_t>(l.grid.x * l.grid.y * l.grid.z);
      const size_t size = programs * l.num_ctas * static_cast<size_t>(nbytes);
      if (user) {
        data = user->allocate(user->user, size, static_cast<size_t>(alignment), stream);
      } else if (driver.allocate && driver.free) {
        driver.check(driver.allocate(&data, size, of_driver(stream)), "cuMemAllocAsync");
      }
      if (!data)
        throw Error("no " + std::to_string(size) + " bytes of scratch memory; set_scratch() gives it some",
                    r.function->name, r.specialization.text);
    }
    ~Memory() {
      if (data && user && user->free) user->free(user->user, data, stream);
      if (data && !user) driver.free(data, of_driver(stream));
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    const cuda::Driver& driver;
    const Stream stream;
    const Scratch* const user;
    void* data = nullptr;
  };
};

// Records by hash. Read without a lock; whoever writes holds the site's.
struct Table {
  explicit Table(size_t size) : places(size) {}
  std::vector<std::atomic<const Record*>> places;  // a power of two, some of them empty

  void put(const Record* record, uint64_t hash) {
    size_t at = hash >> 32;
    while (places[at & (places.size() - 1)].load(std::memory_order_relaxed)) ++at;
    places[at & (places.size() - 1)].store(record, std::memory_order_release);
  }
};

// One function called with one list of types at one place.
struct Site {
  Site(const cuda::Driver& driver, const Function* function, std::span<const Leaf> leaves)
      : driver(driver), function(function), signature(function->signature()),
        binding(triton::bind(signature, leaves)), n_compared(n_head_words + binding.n_compared),
        mask(n_head_words, ~uint64_t{0}) {
    mask.insert(mask.end(), binding.mask.begin(), binding.mask.end());
  }

  const cuda::Driver& driver;
  const Function* const function;
  const Signature& signature;
  const Binding binding;
  const size_t n_compared;
  std::vector<uint64_t> mask;
  Site* next = nullptr;
  std::atomic<const Record*> last{};

  const Record* find(const Call& call) {
    const Record* record = last.load(std::memory_order_acquire);
    if (record && is_key(*record, call)) [[likely]]
      return record;
    record = search(call);
    if (!record) record = make(call);
    last.store(record, std::memory_order_release);
    return record;
  }

 private:
  bool is_key(const Record& record, const Call& call) const {
    const uint64_t *words = call.words.data(), *key = record.key.data(), *masks = mask.data();
    uint64_t different = 0;
    for (size_t k = 0; k < n_compared; ++k) different |= (words[k] & masks[k]) ^ key[k];
    return different == 0 &&
           std::equal(call.strings.begin(), call.strings.end(), record.strings.begin());
  }

  uint64_t hash(const uint64_t* words) const {
    uint64_t h = 0;
    for (size_t k = 0; k < n_compared; ++k) h = std::rotl((h ^ (words[k] & mask[k])) * kMix, 29);
    return h * kMix;
  }

  const Record* search(const Call& call) const {
    const Table* table = table_.load(std::memory_order_acquire);
    if (!table) return nullptr;
    for (size_t at = hash(call.words.data()) >> 32;; ++at) {
      const Record* r = table->places[at & (table->places.size() - 1)].load(std::memory_order_acquire);
      if (!r || is_key(*r, call)) return r;
    }
  }

  const Record* make(const Call& call);
  const cuda::Kernel* load(const Call& call, const Specialization& specialization) const;
  void publish(const Record* record);

  std::mutex mutex_;
  std::atomic<Table*> table_{};
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<const Record*> records_;
};

void Site::publish(const Record* record) {
  records_.push_back(record);
  Table* table = table_.load(std::memory_order_relaxed);
  if (table && 2 * records_.size() <= table->places.size())
    return table->put(record, hash(record->key.data()));
  tables_.push_back(std::make_unique<Table>(std::bit_ceil(4 * records_.size())));
  table = tables_.back().get();  // the old one stays: it may still be read
  for (const Record* r : records_) table->put(r, hash(r->key.data()));
  table_.store(table, std::memory_order_release);
}

const Record* Site::make(const Call& call) {
  uint64_t* words = call.words.data();
  if (words[0] == 0) {  // a thread that has not met CUDA
    driver.need_context(0);
    words[0] = current_context(driver);
    if (const Record* found = search(call)) return found;
  }
  const auto* states = reinterpret_cast<const uint8_t*>(words + n_head_words);
  const uint64_t* values = words + n_head_words + n_state_words(call.leaves.size());
  auto record = std::make_unique<Record>(Record{function, &signature, &driver});
  record->specialization =
      specialize(signature, binding, Arguments(call.leaves, states, values, call.strings));
  record->kernel = told(function->name, record->specialization.text,
                        [&] { return load(call, record->specialization); });

  for (size_t k = 0; k < n_compared; ++k) record->key.push_back(words[k] & mask[k]);
  record->strings.assign(call.strings.begin(), call.strings.end());
  const auto first = static_cast<uint32_t>(values - words);
  for (uint32_t k = 0; k < record->specialization.slots.size(); ++k) {
    const Slot& slot = record->specialization.slots[k];
    record->offsets.push_back(slot.is_default ? 0 : 8 * (first + slot.word));
    if (slot.is_default) record->defaults.push_back(k);
    if (slot.fix && !slot.is_default) record->fixes.push_back(k);
  }
  record->plain = record->defaults.empty() && record->fixes.empty();

  const std::scoped_lock lock(mutex_);
  if (const Record* found = search(call)) return found;  // another thread was faster
  publish(record.get());
  return record.release();
}

const cuda::Kernel* Site::load(const Call& call, const Specialization& specialization) const {
  const std::string& text = specialization.text;
  int device = 0, major = 0, minor = 0;
  driver.check(driver.current_device(&device), "cuCtxGetDevice");
  driver.check(driver.device_attribute(&major, kMajor, device), "cuDeviceGetAttribute");
  driver.check(driver.device_attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
  const Request request{function->file, function->name, text,
                        options_text(signature, call.launch.options), 10 * major + minor};
  Flight& flight = function->flight(text + ";" + request.options + ";" + std::to_string(request.capability));
  const std::scoped_lock lock(flight.mutex);
  std::unique_ptr<Loaded>& loaded = flight.loaded[call.words[0]];
  if (!loaded) {
    int capturing = 0;
    driver.check(driver.is_capturing(of_driver(call.launch.stream), &capturing), "cuStreamIsCapturing");
    if (capturing)
      throw std::runtime_error("it is not loaded yet and the stream is being captured: launch it once before");
    if (!flight.binary) flight.binary = function->provider->compile(request);
    flight.signature = function->name + " " + text + (request.options.empty() ? "" : " ") + request.options;
    loaded = std::make_unique<Loaded>(driver, *flight.binary, specialization);
  }
  return &loaded->kernel;
}

namespace {
Site& new_site(Sites& sites, const Call& call) {
  static std::mutex mutex;
  call.function->signature();  // may take long: not under the lock
  const std::scoped_lock lock(mutex);
  Site* first = sites.all.load(std::memory_order_acquire);
  Site* site = first;
  while (site && site->function != call.function) site = site->next;
  if (!site) {
    site = new Site(cuda::Driver::machine(), call.function, call.leaves);
    site->next = first;
    sites.all.store(site, std::memory_order_release);
  }
  return *site;
}

Site& site_of(Sites& sites, const Call& call) {
  std::atomic<Site*>& quick = sites.quick[call.function->id % Sites::n_quick];
  Site* site = quick.load(std::memory_order_acquire);
  if (site && site->function == call.function) [[likely]]
    return *site;
  site = sites.all.load(std::memory_order_acquire);
  while (site && site->function != call.function) site = site->next;
  if (!site) site = &new_site(sites, call);
  quick.store(site, std::memory_order_release);
  return *site;
}

void head(const cuda::Driver& driver, const Call& call) {
  const Options& o = call.launch.options;
  const auto half = [](int16_t v, int at) { return uint64_t{static_cast<uint16_t>(v)} << at; };
  call.words[0] = current_context(driver);
  call.words[1] = half(o.num_warps, 0) | half(o.num_stages, 16) | half(o.num_ctas, 32) | half(o.maxnreg, 48);
  call.words[2] = address(o.others) | o.cooperative | uint64_t{o.pdl} << 1;
}

const Record& find(Sites& sites, const Call& call) {
  return told(call.function->name, "", [&]() -> const Record& {
    Site& site = site_of(sites, call);
    head(site.driver, call);
    return *site.find(call);
  });
}
}  // namespace

void launch(Sites& sites, const Call& call) {
  const Grid& grid = call.launch.grid;
  if (is_empty(grid)) return;
  const Record& record = find(sites, call);
  auto** parameters = static_cast<void**>(alloca((record.offsets.size() + 2) * sizeof(void*)));
  record.address(call.words.data(), parameters);
  cuda::Config config = record.config_of(grid);
  record.launch(grid, config, call.launch.stream, parameters);
}

struct Plan {
  const Record* record;  // null: the grid is empty
  Grid grid;
  cuda::Config config;
  std::vector<uint64_t> words;
  std::vector<void*> parameters;
};

Plan* bind(Sites& sites, const Call& call) {
  const Grid& grid = call.launch.grid;
  auto plan = std::make_unique<Plan>(Plan{nullptr, grid, {}, {}, {}});
  if (is_empty(grid)) return plan.release();
  plan->record = &find(sites, call);
  plan->config = plan->record->config_of(grid);
  plan->words.assign(call.words.begin(), call.words.end());
  plan->parameters.resize(plan->record->offsets.size() + 2);
  plan->record->address(plan->words.data(), plan->parameters.data());
  return plan.release();
}

void launch(const Plan& plan, Stream stream) {
  if (!plan.record) return;
  const size_t n = plan.parameters.size();
  auto** parameters = static_cast<void**>(alloca(n * sizeof(void*)));
  std::memcpy(parameters, plan.parameters.data(), n * sizeof(void*));
  cuda::Config config = plan.config;
  plan.record->launch(plan.grid, config, stream, parameters);
}

void destroy(Plan* plan) { delete plan; }
}  // namespace detail

void set_hooks(const Hooks* given) { hooks.store(given, std::memory_order_release); }
void set_scratch(const Scratch* given) { scratch_memory.store(given, std::memory_order_release); }

namespace {
struct Functions {
  std::mutex mutex;
  std::map<std::tuple<Provider*, std::string, std::string>, detail::Function> all;
};
Functions& functions() {
  static auto* made = new Functions;
  return *made;
}
}  // namespace

Kernel jit(const std::string& file, const std::string& function, std::shared_ptr<Provider> provider) {
  Functions& f = functions();
  const std::scoped_lock lock(f.mutex);
  const auto key = std::make_tuple(provider.get(), file, function);
  return Kernel(&f.all.try_emplace(key, std::move(provider), file, function, f.all.size()).first->second);
}

std::vector<std::string> signatures() {
  std::vector<std::string> found;
  Functions& f = functions();
  const std::scoped_lock lock(f.mutex);
  for (const auto& [key, function] : f.all) function.list(found);
  return found;
}

Kernel from_pack(std::shared_ptr<Provider> pack, const std::string& function) {
  return jit("", function, std::move(pack));
}
Kernel from_pack(const std::string& path, const std::string& function) {
  static std::mutex mutex;
  static auto* all = new std::map<std::string, std::shared_ptr<Provider>>;
  const std::scoped_lock lock(mutex);
  std::shared_ptr<Provider>& pack = (*all)[path];
  if (!pack) pack = open_pack(path);
  return from_pack(pack, function);
}

}  // namespace plait::triton
