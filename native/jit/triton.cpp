// native/jit/triton.cpp: from a call to a launch. What a hit does is launch(Sites&, Call) down to
// Record::launch; everything else happens once a key.
#include <alloca.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/cuda.h"
#include "jit/specialize.h"
#include "jit/tune.h"

namespace plait::triton {
namespace {
constexpr int kMajor = 75, kMinor = 76;  // device attributes
constexpr uint64_t kMix = 0x9e3779b97f4a7c15;
std::atomic<const Hooks*> hooks{};
std::atomic<const Tuning*> tuning{};

struct Counts {
  std::atomic<uint64_t> hits, misses, compiled, loaded, tuned;
  std::mutex mutex;
  std::string last_miss;
};
constinit std::atomic<bool> counting{};
Counts& counts() {
  static auto* made = new Counts{};
  return *made;
}

// The device's answers to a launch that mean: not with these options.
constexpr int kInvalidValue = 1, kLaunchOutOfResources = 701, kInvalidClusterSize = 912;

bool is_empty(const Grid& grid) { return grid.x <= 0 || grid.y <= 0 || grid.z <= 0; }

// Whatever goes wrong below is told with the kernel's name.
template <class F>
decltype(auto) told(const std::string& kernel, const std::string& specialization, F f) {
  try {
    return f();
  } catch (const Error&) {
    throw;
  } catch (const cuda::OutOfResources& error) {
    throw Refused(error.what(), kernel, specialization);
  } catch (const cuda::DriverError& error) {
    if (error.code == kInvalidValue || error.code == kLaunchOutOfResources || error.code == kInvalidClusterSize)
      throw Refused(error.what(), kernel, specialization);
    throw Error(error.what(), kernel, specialization);
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
  Loaded(const cuda::Driver& driver, const Binary& b, const std::vector<Slot>& slots)
      : kernel(driver, b.image.data(),
               {.symbol = b.symbol, .num_warps = b.num_warps, .num_ctas = b.num_ctas,
                .shared = b.shared, .global_scratch = b.global_scratch,
                .global_alignment = b.global_alignment, .profile_scratch = b.profile_scratch,
                .profile_alignment = b.profile_alignment, .cooperative = b.cooperative,
                .pdl = b.pdl},
               slots.size()) {
    for (size_t k = 0; k < slots.size(); ++k) {
      const size_t nbytes = kernel.parameter_nbytes(k);
      if (nbytes != 0 && nbytes != slots[k].nbytes)
        throw std::runtime_error("parameter " + std::to_string(k) + " of the compiled kernel has " +
                                 std::to_string(nbytes) + " bytes, its type " + std::to_string(slots[k].nbytes));
    }
  }
  cuda::Kernel kernel;
};

// One key that is being compiled, or is: whoever comes second waits for the first.
struct Flight {
  std::mutex mutex;
  std::string signature;  // empty: only timed so far
  std::optional<Binary> binary;
  std::exception_ptr refused;                          // by the compiler, for good
  std::map<uint64_t, std::unique_ptr<Loaded>> loaded;  // by context

  // The mutex is held.
  const Binary& compile(Provider& provider, const Request& request) {
    if (refused) std::rethrow_exception(refused);
    try {
      if (binary) return *binary;
      binary = provider.compile(request);
      ++counts().compiled;
    } catch (const Refused&) {
      refused = std::current_exception();
      throw;
    }
    return *binary;
  }
};

// Signatures and facts go to a file as they are met: a process may end as it likes.
class Recorder {
 public:
  Recorder() {
    if (const char* path = std::getenv("PLAIT_TRITON_RECORD")) open(path);
  }
  void open(const std::string& path) {
    const std::scoped_lock lock(mutex_);
    if (file_ >= 0) close(file_);
    file_ = path.empty() ? -1 : ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file_ < 0 && !path.empty()) throw Error("cannot write the record " + path, "(all)");
  }
  void note(std::string line) {
    const std::scoped_lock lock(mutex_);
    if (file_ < 0) return;
    line += '\n';  // one write: other processes may have the same file
    if (write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      throw Error("the record cannot be written", line);
  }

 private:
  std::mutex mutex_;
  int file_ = -1;
};
Recorder& recorder() {
  static auto* made = new Recorder;
  return *made;
}

bool is_capturing(const cuda::Driver& driver, Stream stream) {
  int capturing = 0;
  driver.check(driver.is_capturing(of_driver(stream), &capturing), "cuStreamIsCapturing");
  return capturing != 0;
}
}  // namespace

namespace detail {
// A Python function of a provider.
class Function {
 public:
  Function(std::shared_ptr<Provider> provider, std::string file, std::string name, size_t id)
      : provider(std::move(provider)), file(std::move(file)), name(std::move(name)), id(id) {}

  const Signature& signature() const {
    const auto lock = provider->hold(mutex_);
    if (signature_) return *signature_;
    Signature made(name, provider->describe(file, name));
    for (const std::string& fact : made.facts) {
      facts.read(name, fact);
      recorder().note(name + " @" + fact);
    }
    return signature_.emplace(std::move(made));
  }
  Flight& flight(const Request& r) const {
    const auto lock = provider->hold(mutex_);
    return flights_[r.specialization + ";" + r.options + ";" + std::to_string(r.capability)];
  }

  void list(std::vector<std::string>& signatures) const {
    for (const std::string& fact : facts.lines()) signatures.push_back(name + " @" + fact);
    const auto lock = provider->hold(mutex_);
    for (auto& [key, flight] : flights_) {
      const auto flying = provider->hold(flight.mutex);
      if (!flight.signature.empty()) signatures.push_back(flight.signature);
    }
  }

  void learn(const std::string& kind, const std::vector<std::string>& names, const Settings& told,
             const std::string& result) const {
    recorder().note(name + " @" + facts.add(kind, names, told, result));
  }

  // What decides whether a value is part of a key.
  std::vector<std::string> deciding_names() const {
    std::vector<std::string> names = facts.names();
    for (const Layer& layer : signature().layers)
      if (layer.tunes) names.insert(names.end(), layer.names.begin(), layer.names.end());
    return names;
  }

  const std::shared_ptr<Provider> provider;
  const std::string file, name;
  const size_t id;
  mutable Facts facts;
  mutable std::mutex deciding;  // one call's decorators are asked at a time

 private:
  mutable std::mutex mutex_;
  mutable std::optional<Signature> signature_;
  mutable std::map<std::string, Flight> flights_;
};

// What a call with one key launches.
// A CUtensorMap, and what the kernel takes for the last extent if its elements are half a byte.
struct TensorMap {
  alignas(64) std::byte bytes[Recipe::map_nbytes];
  int64_t last_extent;
};

struct Record {
  const Function* function;
  const Signature* signature;
  const cuda::Driver* driver;
  const cuda::Kernel* kernel = nullptr;
  const Binding* binding = nullptr;
  Settings chosen;  // by decorators
  Specialization specialization;
  const std::vector<uint64_t>* mask = nullptr;  // of the words that the key has
  std::vector<uint64_t> key;
  std::vector<std::string> strings;
  std::vector<uint32_t> offsets;          // of each parameter in the call's words, in bytes
  std::vector<uint32_t> defaults, fixes, made;  // slots that are not simply the call's
  std::vector<uint32_t> descriptors;            // the first slot of each
  bool plain = true;                            // there are none of them
  std::vector<Recipe> recipes;
  int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                int, int, int) = nullptr;

  bool is_of(const Call& call) const {
    const uint64_t *words = call.words.data(), *known = key.data(), *masks = mask->data();
    uint64_t different = 0;
    for (size_t k = 0, n = key.size(); k < n; ++k) different |= (words[k] & masks[k]) ^ known[k];
    return different == 0 && std::equal(call.strings.begin(), call.strings.end(), strings.begin());
  }

  Grid grid_of(const Call& call) const {
    const Rule& rule = call.launch.rule;
    return rule.call ? rule.call(rule.captured, Meta(*this, call)) : call.launch.grid;
  }

  // Fills the addresses of the parameters; the words may change. maps: one for each of `recipes`.
  void address(uint64_t* words, void** parameters, TensorMap* maps) const {
    auto* base = reinterpret_cast<char*>(words);
    for (size_t k = 0; k < offsets.size(); ++k) parameters[k] = base + offsets[k];
    if (plain) [[likely]]
      return;
    const std::vector<Slot>& slots = specialization.slots;
    for (const uint32_t k : defaults) parameters[k] = const_cast<uint64_t*>(&specialization.defaults[slots[k].word]);
    const auto* states = reinterpret_cast<const uint8_t*>(words + n_head_words);
    for (const uint32_t k : fixes)
      fix(slots[k], *signature, states[slots[k].leaf], reinterpret_cast<uint64_t*>(parameters[k]));
    for (const uint32_t k : descriptors) {
      // The base is in the word after the type, which is where a map would be.
      const Fields fields(reinterpret_cast<const uint64_t*>(parameters[k]) - (slots[k].map < 0));
      if (const char* wrong = fields.wrong(state::type_of(states[slots[k].leaf]))) refuse(slots[k], wrong);
      if (slots[k].map >= 0) make(maps[slots[k].map], recipes[static_cast<size_t>(slots[k].map)], fields);
    }
    for (const uint32_t k : made) {
      TensorMap& map = maps[slots[k].map];
      parameters[k] = slots[k].nbytes == Recipe::map_nbytes ? static_cast<void*>(map.bytes) : &map.last_extent;
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
    const Memory global = scratch(launched, facts.global_scratch, facts.global_alignment);
    const Memory profile = scratch(launched, facts.profile_scratch, facts.profile_alignment);
    memory[0] = global.data;
    memory[1] = profile.data;
    enqueue(config, parameters);
    if (hook && hook->exit) hook->exit(hook->user, launched);
  }

 private:
  void enqueue(const cuda::Config& config, void** parameters) const {
    told(function->name, specialization.text, [&] { kernel->launch(config, parameters); });
  }

  [[noreturn]] void refuse(const Slot& slot, const char* why) const {
    const auto p = static_cast<size_t>(slot.parameter);
    throw Error("argument " + std::to_string(p) + " (" + signature->parameters[p].name + "), a tensor descriptor: " + why,
                function->name, specialization.text, slot.parameter);
  }

  void make(TensorMap& map, const Recipe& r, const Fields& fields) const {
    constexpr size_t n = Extents::max_rank;
    constexpr int no_interleave = 0, promote_128_bytes = 2;
    const size_t rank = fields.rank();
    uint64_t shape[n], strides[n];  // the innermost first, in bytes
    uint32_t block[n], ones[n] = {1, 1, 1, 1, 1};
    for (size_t k = 0; k < rank; ++k) {
      const size_t from = rank - 1 - k;
      shape[k] = static_cast<uint64_t>(fields.shape(from)) << (r.is_fp4 && k == 0);
      block[k] = r.block[from];
      if (from > 0) strides[k] = static_cast<uint64_t>(fields.stride(from - 1) * r.nbytes);
    }
    strides[rank - 1] = shape[rank - 1] * (rank == 1 ? static_cast<uint64_t>(r.nbytes) : strides[rank - 2]);
    map.last_extent = static_cast<int64_t>(shape[0]);
    told(function->name, specialization.text, [&] {
      driver->check(encode(map.bytes, r.type, static_cast<uint32_t>(rank), reinterpret_cast<void*>(fields.base()),
                           shape, strides, block, ones, no_interleave, r.swizzle, promote_128_bytes, fields.nan()),
                    "cuTensorMapEncodeTiled");
    });
  }

  Memory scratch(const Launched& l, int64_t nbytes, int64_t alignment) const {
    const auto programs = static_cast<size_t>(l.grid.x * l.grid.y * l.grid.z);
    return told(function->name, specialization.text, [&] {
      return Memory(*driver, programs * l.num_ctas * static_cast<size_t>(nbytes), static_cast<size_t>(alignment),
                    l.stream);
    });
  }
};

uint64_t hash_of(const std::vector<uint64_t>& mask, size_t n, const uint64_t* words) {
  uint64_t h = 0;
  for (size_t k = 0; k < n; ++k) h = std::rotl((h ^ (words[k] & mask[k])) * kMix, 29);
  return h * kMix;
}

// Records by hash, all with one mask. Read without a lock; whoever writes holds the site's.
struct Table {
  Table(const std::vector<uint64_t>& mask, size_t n_compared, size_t size)
      : mask(mask), n_compared(n_compared), places(size) {}
  const std::vector<uint64_t>& mask;
  const size_t n_compared;
  std::vector<std::atomic<const Record*>> places;  // a power of two, some of them empty

  const Record* find(const Call& call) const {
    for (size_t at = hash_of(mask, n_compared, call.words.data()) >> 32;; ++at) {
      const Record* r = places[at & (places.size() - 1)].load(std::memory_order_acquire);
      if (!r || r->is_of(call)) return r;
    }
  }
  void put(const Record* record) {
    size_t at = hash_of(mask, n_compared, record->key.data()) >> 32;
    while (places[at & (places.size() - 1)].load(std::memory_order_relaxed)) ++at;
    places[at & (places.size() - 1)].store(record, std::memory_order_release);
  }
};

// A call whose key is new: what its decorators and its kernel are made from.
struct Asked {
  Asked(const Call& call, const Signature& signature, const Binding& binding)
      : call(call),
        arguments(call.leaves, reinterpret_cast<const uint8_t*>(call.words.data() + n_head_words),
                  call.words.data() + n_head_words + n_state_words(call.leaves.size()), call.strings) {
    if (signature.layers.empty()) return;
    std::string types;
    for (size_t k = 0; k < arguments.size(); k = arguments.next(k)) {
      const auto p = static_cast<size_t>(
          std::find(binding.sources.begin(), binding.sources.end(), static_cast<int>(k)) - binding.sources.begin());
      Settings& group = arguments.leaf(k).name ? named : positional;
      group.emplace_back(signature.parameters[p].name, arguments.value(k, true));
      if (arguments.leaf(k).kind == Kind::pointer && !(arguments.state(k) & state::none))
        types += (types.empty() ? "" : ",") + arguments.value(k, true).substr(1);
    }
    const Settings options = options_of(signature, call.launch.options);
    named.insert(named.end(), options.begin(), options.end());
    facts = {{"@types", "(" + types + ")"}};
  }

  // All that an answer may depend on.
  Settings told(const Settings& chosen) const {
    Settings all = positional;
    for (const Settings* more : {&named, &chosen, &facts}) all.insert(all.end(), more->begin(), more->end());
    return all;
  }
  std::string question(const Settings& chosen) const {
    Settings named_too = named;
    named_too.insert(named_too.end(), chosen.begin(), chosen.end());
    named_too.insert(named_too.end(), facts.begin(), facts.end());
    return write_settings(positional) + ";*;" + write_settings(named_too);
  }

  const Call& call;
  const Arguments arguments;
  Settings positional, named, facts;
};

struct WantsLengths {};

// One function called with one list of types at one place.
struct Site {
  Site(const cuda::Driver& driver, const Function* function, std::span<const Leaf> leaves)
      : driver(driver), function(function), signature(function->signature()),
        binding(triton::bind(signature, leaves)) {}

  const cuda::Driver& driver;
  const Function* const function;
  const Signature& signature;
  const Binding binding;
  Site* next = nullptr;
  std::atomic<const Record*> last{};

  const Record* find(const Call& call) {
    const Record* record = last.load(std::memory_order_acquire);
    if (record && record->is_of(call)) [[likely]] {
      if (counting.load(std::memory_order_relaxed)) [[unlikely]]
        ++counts().hits;
      return record;
    }
    record = search(call);
    if (!record)
      record = make(call);
    else if (counting.load(std::memory_order_relaxed))
      ++counts().hits;
    last.store(record, std::memory_order_release);
    return record;
  }

 private:
  const Record* search(const Call& call) const {
    const Table* table = table_.load(std::memory_order_acquire);
    return table ? table->find(call) : nullptr;
  }

  const Record* make(const Call& call);
  std::unique_ptr<Record> prepare(const Asked& asked, const Settings& chosen, bool timed = false) const;
  Settings decide(Asked& asked, size_t layer, Settings chosen) const;
  std::string ask(const Asked& asked, const std::string& kind, const Settings& chosen) const;
  Settings tune(Asked& asked, size_t layer, const Settings& chosen) const;
  std::vector<double> time(const Asked& asked, const Layer& layer, const std::vector<Settings>& candidates) const;
  Request request_of(const Asked& asked, const Specialization& specialization, const Settings& chosen) const;
  const cuda::Kernel* load(const Asked& asked, Record& record, bool timed) const;
  const std::vector<uint64_t>& mask_of(std::span<const Leaf> leaves);
  void publish(Record* record, const Call& call);
  void note_miss(const Record& record) const;

  std::mutex mutex_;
  std::atomic<Table*> table_{};
  std::vector<std::unique_ptr<Table>> tables_;
  std::vector<std::unique_ptr<std::vector<uint64_t>>> masks_;
  std::vector<const Record*> records_;  // of the last mask
};

// What of a call's words is its key. It grows with what answers of decorators depended on; records of a
// smaller one stay right.
const std::vector<uint64_t>& Site::mask_of(std::span<const Leaf> leaves) {
  Binding wide = binding;
  if (!signature.layers.empty()) widen(wide, signature, leaves, function->deciding_names());
  std::vector<uint64_t> mask(n_head_words, ~uint64_t{0});
  mask.insert(mask.end(), wide.mask.begin(), wide.mask.begin() + static_cast<std::ptrdiff_t>(wide.n_compared));
  if (masks_.empty() || *masks_.back() != mask) {
    masks_.push_back(std::make_unique<std::vector<uint64_t>>(std::move(mask)));
    records_.clear();
  }
  return *masks_.back();
}

void Site::publish(Record* record, const Call& call) {
  record->mask = &mask_of(call.leaves);
  for (size_t k = 0; k < record->mask->size(); ++k) record->key.push_back(call.words[k] & (*record->mask)[k]);
  record->strings.assign(call.strings.begin(), call.strings.end());
  records_.push_back(record);
  Table* table = table_.load(std::memory_order_relaxed);
  if (table && &table->mask == record->mask && 2 * records_.size() <= table->places.size()) return table->put(record);
  tables_.push_back(
      std::make_unique<Table>(*record->mask, record->mask->size(), std::bit_ceil(4 * records_.size())));
  table = tables_.back().get();  // the old one stays: it may still be read
  for (const Record* r : records_) table->put(r);
  table_.store(table, std::memory_order_release);
}

const Record* Site::make(const Call& call) {
  uint64_t* words = call.words.data();
  if (words[0] == 0) {  // a thread that has not met CUDA
    driver.need_context(0);
    words[0] = current_context(driver);
    if (const Record* found = search(call)) return found;
  }
  Asked asked(call, signature, binding);
  Settings chosen;
  if (!signature.layers.empty()) {
    const auto lock = function->provider->hold(function->deciding);
    chosen = decide(asked, 0, {});
  }
  std::unique_ptr<Record> record = prepare(asked, chosen);
  note_miss(*record);
  const auto lock = function->provider->hold(mutex_);
  if (const Record* found = search(call)) return found;  // another thread was faster
  publish(record.get(), call);
  return record.release();
}

void Site::note_miss(const Record& record) const {
  const Record* before = last.load(std::memory_order_acquire);
  Counts& c = counts();
  ++c.misses;
  const std::scoped_lock lock(c.mutex);
  c.last_miss = function->name + " " + record.specialization.text + ", " +
                (before ? "before it " + before->specialization.text : "the first call of its kind");
}

std::unique_ptr<Record> Site::prepare(const Asked& asked, const Settings& chosen, bool timed) const {
  auto record = std::make_unique<Record>(Record{function, &signature, &driver});
  record->binding = &binding;
  record->chosen = chosen;
  record->specialization = specialize(signature, binding, asked.arguments, chosen);
  record->kernel =
      told(function->name, record->specialization.text, [&] { return load(asked, *record, timed); });
  const auto first = static_cast<uint32_t>(n_head_words + n_state_words(asked.call.leaves.size()));
  int last = -1;  // the parameter of the slot before
  for (uint32_t k = 0; k < record->specialization.slots.size(); ++k) {
    const Slot& slot = record->specialization.slots[k];
    record->offsets.push_back(slot.is_default ? 0 : 8 * (first + slot.word));
    if (slot.is_default) record->defaults.push_back(k);
    if (slot.fix && !slot.is_default) record->fixes.push_back(k);
    if (slot.from == Kind::descriptor && slot.parameter != last) record->descriptors.push_back(k);
    if (slot.map >= 0) record->made.push_back(k);
    last = slot.parameter;
  }
  record->plain = record->defaults.empty() && record->fixes.empty() && record->descriptors.empty();
  return record;
}

Request Site::request_of(const Asked& asked, const Specialization& specialization, const Settings& chosen) const {
  int device = 0, major = 0, minor = 0;
  driver.check(driver.current_device(&device), "cuCtxGetDevice");
  driver.check(driver.device_attribute(&major, kMajor, device), "cuDeviceGetAttribute");
  driver.check(driver.device_attribute(&minor, kMinor, device), "cuDeviceGetAttribute");
  return {function->file, function->name, specialization.text,
          options_text(signature, options_of(signature, asked.call.launch.options, chosen)), 10 * major + minor};
}

const cuda::Kernel* Site::load(const Asked& asked, Record& record, bool timed) const {
  const Request request = request_of(asked, record.specialization, record.chosen);
  const std::string& text = request.specialization;
  Flight& flight = function->flight(request);
  const auto lock = function->provider->hold(flight.mutex);
  std::unique_ptr<Loaded>& loaded = flight.loaded[asked.call.words[0]];
  if (!loaded && is_capturing(driver, asked.call.launch.stream))
    throw std::runtime_error("it is not loaded yet and the stream is being captured: launch it once before");
  const Binary& binary = flight.compile(*function->provider, request);
  record.recipes = read_recipes(binary.descriptors);
  if (!record.recipes.empty()) driver.need(record.encode, "cuTensorMapEncodeTiled");
  record.specialization.slots = expand(record.specialization.slots, record.recipes, asked.arguments);
  if (!loaded) {
    loaded = std::make_unique<Loaded>(driver, binary, record.specialization.slots);
    ++counts().loaded;
  }
  if (!timed && flight.signature.empty())
    recorder().note(flight.signature =
                        function->name + " " + text + (request.options.empty() ? "" : " ") + request.options);
  return &loaded->kernel;
}

Settings Site::decide(Asked& asked, size_t layer, Settings chosen) const {
  for (; layer < signature.layers.size(); ++layer) {
    const Layer& l = signature.layers[layer];
    Settings found;
    if (!l.tunes) {
      found = read_settings(ask(asked, "heuristics" + std::to_string(layer), chosen));
    } else {
      found = l.configs.size() == 1 ? l.configs[0] : tune(asked, layer, chosen);
    }
    chosen.insert(chosen.end(), found.begin(), found.end());
  }
  return chosen;
}

// What is known, or the provider says.
std::string Site::ask(const Asked& asked, const std::string& kind, const Settings& chosen) const {
  const Settings told = asked.told(chosen);
  if (const auto known = function->facts.find(kind, told)) return *known;
  const std::string answer =
      function->provider->evaluate({function->file, function->name, kind, asked.question(chosen)});
  const size_t line = std::min(answer.find('\n'), answer.size());
  std::vector<std::string> names;
  for (const std::string_view name : split(std::string_view(answer).substr(0, line), ','))
    if (!name.empty()) names.emplace_back(name);
  const std::string result = line < answer.size() ? answer.substr(line + 1) : "";
  function->learn(kind, names, told, result);
  return result;
}

Settings Site::tune(Asked& asked, size_t layer, const Settings& chosen) const {
  const Layer& l = signature.layers[layer];
  const Machine machine = machine_of(driver);
  const std::string number = std::to_string(layer), kind = "tuned" + number;
  std::vector<std::string> names = l.names;
  names.insert(names.end(), {"@types", "@gpu"});
  if (asked.facts.size() == 1) asked.facts.emplace_back("@gpu", quoted(machine.gpu));
  const Settings told = asked.told(chosen);
  if (const auto known = function->facts.find(kind, told)) return read_settings(*known);

  std::vector<Settings> configs = l.configs;
  if (l.prunes) {
    configs.clear();
    const std::string left = ask(asked, "pruned" + number, chosen);
    for (const std::string_view one : split(left, '|')) configs.push_back(read_settings(one));
  }
  if (configs.size() == 1) return configs[0];

  const Tuning* policy = tuning.load(std::memory_order_acquire);
  const std::string condition = conditions(names, told);
  std::string key = "plait tuned 1\n" + signature.identity + "\n" + machine.gpu + "\n" + machine.driver + "\n" +
                    function->name + " " + kind + " " + condition;
  for (const Settings& c : configs) key += "\n" + write_settings(c);
  static const Tuning nowhere{Miss::tune, ""};
  const TunedFile file(signature.identity.empty() ? &nowhere : policy, key);
  std::optional<std::string> best = file.read();
  const auto refuse = [&](const std::string& why) { throw Error(why + "\n  key: " + condition, function->name); };
  if (!best && policy && policy->on_miss == Miss::error)
    refuse("no configuration is known for this key: a pack's table may have '" + function->name + " @" + kind + " " +
           condition + " -> " + write_settings(configs[0]) + "'");
  if (!best && policy && policy->on_miss == Miss::first) return configs[0];
  if (!best) {
    if (is_capturing(driver, asked.call.launch.stream))
      refuse("it is not tuned yet and the stream is being captured: launch it once before");
    if (!asked.call.nbytes.data() && !(l.reset.empty() && l.restore.empty())) throw WantsLengths();
    std::vector<Settings> candidates;
    for (const Settings& c : configs) {
      Settings with = chosen;
      with.insert(with.end(), c.begin(), c.end());
      candidates.push_back(decide(asked, layer + 1, with));
    }
    const std::vector<double> ms = time(asked, l, candidates);
    best = write_settings(configs[static_cast<size_t>(std::min_element(ms.begin(), ms.end()) - ms.begin())]);
    file.write(*best);
    ++counts().tuned;
  }
  function->learn(kind, names, told, *best);
  return read_settings(*best);
}

std::vector<double> Site::time(const Asked& asked, const Layer& layer, const std::vector<Settings>& candidates) const {
  const Call& call = asked.call;
  std::vector<Kept> kept;
  const auto keep = [&](const std::string& name, bool zero) {
    for (size_t k = 0, at = 0; k < call.leaves.size(); k = asked.arguments.next(k), ++at) {
      const auto source = std::find(binding.sources.begin(), binding.sources.end(), static_cast<int>(k));
      if (signature.parameters[static_cast<size_t>(source - binding.sources.begin())].name != name) continue;
      const uint64_t address =
          call.words[n_head_words + n_state_words(call.leaves.size()) + asked.arguments.word(k)];
      if (call.nbytes[at] == 0 && address != 0)
        throw Error("@triton.autotune resets or restores " + name + ", whose length is not known: pass a dense "
                    "tensor or plait::triton::Pointer{data, dtype, nbytes}", function->name);
      if (address != 0) kept.push_back({reinterpret_cast<void*>(address), call.nbytes[at], zero});
    }
  };
  for (const std::string& name : layer.reset) keep(name, true);
  for (const std::string& name : layer.restore) keep(name, false);

  // Compiled by as many threads as the provider likes; who comes second finds it.
  std::atomic<size_t> next{0};
  const auto compile = [&] {
    for (size_t k; (k = next++) < candidates.size();) try {
        const Specialization s = specialize(signature, binding, asked.arguments, candidates[k]);
        const Request request = request_of(asked, s, candidates[k]);
        Flight& flight = function->flight(request);
        const auto lock = function->provider->hold(flight.mutex);
        flight.compile(*function->provider, request);
      } catch (const std::exception&) {  // told below
      }
  };
  std::vector<std::thread> helpers;
  void* context = reinterpret_cast<void*>(call.words[0]);
  const size_t n_helpers = std::min<size_t>(function->provider->concurrency(), candidates.size());
  for (size_t k = 1; k < n_helpers; ++k)
    helpers.emplace_back([&] {
      driver.set_context(context);
      compile();
    });
  if (!helpers.empty()) compile();
  for (std::thread& t : helpers) t.join();

  struct Candidate {
    std::unique_ptr<Record> record;
    std::vector<uint64_t> words;
    std::vector<void*> parameters;
    std::vector<TensorMap> maps;
    std::exception_ptr refused;
  };
  std::vector<Candidate> all(candidates.size());
  std::vector<std::function<void()>> launches;
  for (size_t k = 0; k < all.size(); ++k) {
    Candidate& c = all[k];
    try {
      c.record = prepare(asked, candidates[k], true);
      c.words.assign(call.words.begin(), call.words.end());
      c.parameters.resize(c.record->offsets.size() + 2);
      c.maps.resize(c.record->recipes.size());
      c.record->address(c.words.data(), c.parameters.data(), c.maps.data());
    } catch (const Refused&) {
      c.refused = std::current_exception();
    }
    launches.emplace_back([&] {
      if (c.refused) std::rethrow_exception(c.refused);
      const Grid grid = c.record->grid_of(call);
      if (is_empty(grid)) return;
      cuda::Config config = c.record->config_of(grid);
      c.record->launch(grid, config, call.launch.stream, c.parameters.data());
    });
  }
  return told(function->name, "", [&] { return times(driver, call.launch.stream, kept, launches); });
}

namespace {
Site& new_site(Sites& sites, const Call& call) {
  static std::mutex mutex;
  call.function->signature();  // may take long: not under the lock
  const auto lock = call.function->provider->hold(mutex);
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

// Null: it must be known how long the arguments are.
const Record* find(Sites& sites, const Call& call) {
  return told(call.function->name, "", [&]() -> const Record* {
    Site& site = site_of(sites, call);
    head(site.driver, call);
    try {
      return site.find(call);
    } catch (const WantsLengths&) {
      return nullptr;
    }
  });
}
}  // namespace

namespace {
template <class T>
T* aligned(void* memory) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory) + alignof(T) - 1) / alignof(T) * alignof(T));
}
}  // namespace

bool launch(Sites& sites, const Call& call) {
  if (is_empty(call.launch.grid)) return true;
  const Record* found = find(sites, call);
  if (!found) return false;
  const Record& record = *found;
  const Grid grid = record.grid_of(call);
  if (call.launch.rule.call && is_empty(grid)) return true;
  auto** parameters = static_cast<void**>(alloca((record.offsets.size() + 2) * sizeof(void*)));
  const size_t n_maps = record.recipes.size();
  auto* maps = n_maps == 0 ? nullptr : aligned<TensorMap>(alloca((n_maps + 1) * sizeof(TensorMap)));
  record.address(call.words.data(), parameters, maps);
  cuda::Config config = record.config_of(grid);
  record.launch(grid, config, call.launch.stream, parameters);
  return true;
}

struct Plan {
  Plan(Sites& sites, const Call& call)
      : sites(sites), launch(call.launch), texts(call.strings.begin(), call.strings.end()),
        strings(texts.begin(), texts.end()), given(call.words.begin(), call.words.end()), grid(launch.grid),
        call{call.function, launch, call.leaves, given, strings, call.nbytes} {}

  // Finds the kernel of the words that are given; false: it must be known how long the arguments are.
  bool resolve() {
    if (!launch.rule.call && is_empty(grid)) return true;
    if (!record || !record->is_of(call)) record = find(sites, call);
    call.nbytes = {};
    if (!record) return false;
    grid = record->grid_of(call);
    if (is_empty(grid)) return true;
    words = given;
    config = record->config_of(grid);
    parameters.resize(record->offsets.size() + 2);
    maps.resize(record->recipes.size());
    record->address(words.data(), parameters.data(), maps.data());
    return true;
  }

  Sites& sites;
  const Launch launch;
  const std::vector<std::string> texts;
  const std::vector<std::string_view> strings;
  std::vector<uint64_t> given, words;  // as the call has them, and as the kernel takes them
  const Record* record = nullptr;      // null: the grid is empty
  Grid grid;
  cuda::Config config{};
  std::vector<void*> parameters;
  std::vector<TensorMap> maps;
  Call call;
};

Plan* bind(Sites& sites, const Call& call) {
  auto plan = std::make_unique<Plan>(sites, call);
  return plan->resolve() ? plan.release() : nullptr;
}

void launch(const Plan& plan, Stream stream) {
  if (is_empty(plan.grid)) return;
  const size_t n = plan.parameters.size();
  auto** parameters = static_cast<void**>(alloca(n * sizeof(void*)));
  std::memcpy(parameters, plan.parameters.data(), n * sizeof(void*));
  cuda::Config config = plan.config;
  plan.record->launch(plan.grid, config, stream, parameters);
}

void change(Plan& plan, size_t leaf, std::span<const uint8_t> states, size_t word, std::span<const uint64_t> words) {
  const size_t first = n_head_words + n_state_words(plan.call.leaves.size());
  std::copy(states.begin(), states.end(), reinterpret_cast<uint8_t*>(plan.given.data() + n_head_words) + leaf);
  std::copy(words.begin(), words.end(), plan.given.begin() + static_cast<std::ptrdiff_t>(first + word));
  if (!plan.resolve())
    throw Error("a value that was set has no tuned configuration yet, and resets or restores tensors: launch it once",
                plan.call.function->name);
}

namespace {
// What a graph's node launches: it has no memory of its own for scratch.
cuda::NodeParams node_of(const Plan& plan, void** parameters) {
  const cuda::KernelFacts* facts = is_empty(plan.grid) ? nullptr : &plan.record->kernel->facts();
  if (!facts || facts->global_scratch != 0 || facts->profile_scratch != 0)
    throw Error(facts ? "a kernel with scratch memory is no node of its own: capture its launch"
                      : "a launch with an empty grid is no node of a graph",
                plan.call.function->name);
  static void* none = nullptr;
  std::copy(plan.parameters.begin(), plan.parameters.end() - 2, parameters);
  std::fill_n(parameters + plan.parameters.size() - 2, 2, &none);
  return plan.record->kernel->node_of(plan.config, parameters);
}
}  // namespace

CUgraphNode_st* add_node(const Plan& plan, CUgraph_st* graph, std::span<CUgraphNode_st* const> dependencies) {
  auto** parameters = static_cast<void**>(alloca(plan.parameters.size() * sizeof(void*)));
  const cuda::NodeParams params = node_of(plan, parameters);
  int (*add)(CUgraphNode_st**, CUgraph_st*, CUgraphNode_st* const*, size_t, const cuda::NodeParams*);
  int (*set)(CUgraphNode_st*, int, const void*);
  CUgraphNode_st* node = nullptr;
  told(plan.call.function->name, plan.record->specialization.text, [&] {
    const cuda::Driver& driver = *plan.record->driver;
    driver.need(add, "cuGraphAddKernelNode_v2");
    driver.need(set, "cuGraphKernelNodeSetAttribute");
    driver.check(add(&node, graph, dependencies.data(), dependencies.size(), &params), "cuGraphAddKernelNode");
    for (uint32_t k = 0; k < plan.config.n_attributes; ++k)
      driver.check(set(node, plan.config.attributes[k].id, &plan.config.attributes[k].value),
                   "cuGraphKernelNodeSetAttribute");
  });
  return node;
}

void update_node(const Plan& plan, CUgraphExec_st* graph, CUgraphNode_st* node) {
  auto** parameters = static_cast<void**>(alloca(plan.parameters.size() * sizeof(void*)));
  const cuda::NodeParams params = node_of(plan, parameters);
  told(plan.call.function->name, plan.record->specialization.text, [&] {
    plan.record->driver->check(plan.record->driver->set_node(reinterpret_cast<cuda::GraphExec>(graph),
                                                             reinterpret_cast<cuda::GraphNode>(node), &params),
                               "cuGraphExecKernelNodeSetParams");
  });
}

size_t prepare(Sites& sites, const Call& call) {
  struct Choice {
    size_t leaf, word;
    uint8_t state;
  };
  constexpr uint8_t kinds = state::one | state::aligned;
  constexpr size_t most = 256;
  auto* states = reinterpret_cast<uint8_t*>(call.words.data() + n_head_words);
  std::vector<Choice> varying;
  const Site* site = told(call.function->name, "", [&] { return &site_of(sites, call); });
  const std::vector<std::string> names = call.function->deciding_names();
  std::string parameter;
  for (size_t k = 0, word = n_head_words + n_state_words(call.leaves.size()); k < call.leaves.size(); ++k) {
    const Leaf& leaf = call.leaves[k];
    const auto source = std::find(site->binding.sources.begin(), site->binding.sources.end(), static_cast<int>(k));
    if (source != site->binding.sources.end())  // else it is in a tuple
      parameter = site->signature.parameters[static_cast<size_t>(source - site->binding.sources.begin())].name;
    if (leaf.varies && leaf.kind == Kind::integer && std::find(names.begin(), names.end(), parameter) != names.end())
      throw Error("a decorator decides by " + parameter + ": it cannot vary", call.function->name);
    if (leaf.varies && (leaf.kind == Kind::integer || leaf.kind == Kind::pointer) && !(states[k] & state::none))
      varying.push_back({k, word, states[k]});
    word += leaf.n_words();
  }
  size_t n = 1;
  for (const Choice& c : varying) n *= call.leaves[c.leaf].kind == Kind::integer ? 3 : 2;
  if (n > most)
    throw Error("they would be " + std::to_string(n) + " kernels, " + std::to_string(most) + " at most are prepared",
                call.function->name);
  std::vector<uint64_t> given(call.words.begin(), call.words.end());
  std::vector<const Record*> found;
  for (size_t k = 0; k < n; ++k) {
    std::copy(given.begin(), given.end(), call.words.begin());
    size_t which = k;
    for (const Choice& c : varying) {
      const bool is_integer = call.leaves[c.leaf].kind == Kind::integer;
      const size_t kind = which % (is_integer ? 3 : 2);
      which /= is_integer ? 3 : 2;
      states[c.leaf] = static_cast<uint8_t>((c.state & ~kinds) | (kind == 1 ? state::aligned : kind == 2 ? state::one : 0));
      if (is_integer) call.words[c.word] = kind == 1 ? 16 : kind == 2 ? 1 : 2;
    }
    const Record* record = find(sites, call);
    if (!record)
      throw Error("it is not tuned yet, and resets or restores tensors: launch it once", call.function->name);
    found.push_back(record);
  }
  const auto by_kernel = [](const Record* a, const Record* b) { return a->kernel < b->kernel; };
  std::sort(found.begin(), found.end(), by_kernel);
  return 1 + static_cast<size_t>(std::count_if(found.begin() + 1, found.end(), [&, last = found[0]](const Record* r) mutable {
           return std::exchange(last, r)->kernel != r->kernel;
         }));
}

void destroy(Plan* plan) { delete plan; }
}  // namespace detail

void set_hooks(const Hooks* given) { hooks.store(given, std::memory_order_release); }
Stats stats() {
  Counts& c = counts();
  const std::scoped_lock lock(c.mutex);
  return {c.hits, c.misses, c.compiled, c.loaded, c.tuned, c.last_miss};
}
void record_to(const std::string& path) { recorder().open(path); }
void count_hits(bool on) { counting.store(on); }

void set_tuning(const Tuning* given) { tuning.store(given, std::memory_order_release); }

std::string Provider::evaluate(const Question& q) {
  throw Error("a decorator's Python function must be asked and there is no Python: pack it with '" + q.function +
                  " @" + q.kind + " " + q.arguments + "'",
              q.function);
}

int64_t Meta::operator[](std::string_view name) const {
  const auto refuse = [&](const char* why) -> int64_t {
    throw Error("a grid asks for " + std::string(name) + ", " + why, record_.function->name,
                record_.specialization.text);
  };
  const auto number = [&](const std::string& text) {
    char* end = nullptr;
    const int64_t value = std::strtoll(text.c_str(), &end, 10);
    if (*end == 0 && end != text.c_str()) return value;
    return text == "True" ? 1 : text == "False" ? 0 : refuse("which is no integer");
  };
  if (const std::string* value = find(record_.chosen, name)) return number(*value);
  const std::vector<Parameter>& parameters = record_.signature->parameters;
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (parameters[p].name != name) continue;
    const int source = record_.binding->sources[p];
    if (source < 0) return number(parameters[p].fallback);
    const Leaf& leaf = call_.leaves[static_cast<size_t>(source)];
    if (leaf.kind != Kind::integer && leaf.kind != Kind::boolean) return refuse("which is no integer");
    size_t word = detail::n_head_words + detail::n_state_words(call_.leaves.size());
    for (int k = 0; k < source; ++k) word += call_.leaves[static_cast<size_t>(k)].n_words();
    return static_cast<int64_t>(call_.words[word]);
  }
  return refuse("which is no parameter");
}

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
  std::vector<const detail::Function*> all;
  {
    const std::scoped_lock lock(f.mutex);
    for (const auto& [key, function] : f.all) all.push_back(&function);
  }
  for (const detail::Function* function : all) function->list(found);
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
