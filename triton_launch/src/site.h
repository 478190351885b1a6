// triton_launch/src/site.h: what a call meets on its way to a launch: a site, its records, and the
// function they are of. What a hit does is here and in triton.cpp; site.cpp has what happens once a
// key, function.cpp and record.cpp what it is made of, bound.cpp what is bound.
#pragma once

#include <map>

#include "core/cuda.h"
#include "specialize.h"
#include "tune.h"

namespace plait::triton::detail {

extern std::atomic<const Hooks*> hooks;
extern std::atomic<const Tuning*> tuning;
extern std::atomic<bool> counting;

// What happened so far.
struct Counts {
  std::atomic<uint64_t> hits, misses, compiled, loaded, tuned;
  std::mutex mutex;
  std::string last_miss;
};
Counts& counts();

inline bool is_empty(const Grid& grid) { return grid.x <= 0 || grid.y <= 0 || grid.z <= 0; }

// The device's answers to a launch that mean: not with these options.
inline constexpr int kInvalidValue = 1, kLaunchOutOfResources = 701, kInvalidClusterSize = 912;

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
    if (error.code == kInvalidValue || error.code == kLaunchOutOfResources ||
        error.code == kInvalidClusterSize)
      throw Refused(error.what(), kernel, specialization);
    throw Error(error.what(), kernel, specialization);
  } catch (const std::exception& error) {
    throw Error(error.what(), kernel, specialization);
  }
}

inline uint64_t current_context(const cuda::Driver& driver) {
  void* context = nullptr;
  driver.check(driver.current_context(&context), "cuCtxGetCurrent");
  return reinterpret_cast<uintptr_t>(context);
}

// A compiled kernel in one context.
struct Loaded {
  Loaded(const cuda::Driver& driver, const Binary& binary, const std::vector<Slot>& slots);
  cuda::Kernel kernel;
};

// One key that is being compiled, or is: whoever comes second waits for the first.
struct Flight {
  std::mutex mutex;
  std::string signature;  // empty: only timed so far
  bool is_timed = false;
  std::optional<Binary> binary;
  std::exception_ptr refused;                          // by the compiler, for good
  std::map<uint64_t, std::unique_ptr<Loaded>> loaded;  // by context

  // The mutex is held.
  const Binary& compile(Provider& provider, const Request& request);
};

// Signatures and facts go to a file as they are met: a process may end as it likes.
class Recorder {
 public:
  Recorder();
  void open(const std::string& path);  // "": no file
  void note(std::string line);

 private:
  std::mutex mutex_;
  int file_ = -1;
};
Recorder& recorder();

bool is_capturing(const cuda::Driver& driver, Stream stream);

// A Python function of a provider.
class Function {
 public:
  Function(std::shared_ptr<Provider> provider, std::string file, std::string name, size_t id)
      : provider(std::move(provider)), file(std::move(file)), name(std::move(name)), id(id) {}

  const Signature& signature() const;
  Flight& flight(const Request& request) const;
  void list(std::vector<std::string>& signatures) const;
  void learn(const std::string& kind, const std::vector<std::string>& names, const Settings& told,
             const std::string& result) const;
  // Of what decides whether a value is part of a key.
  std::vector<std::string> deciding_names() const;

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

// A CUtensorMap, and what the kernel takes for the last extent if its elements are half a byte.
struct TensorMap {
  alignas(64) std::byte bytes[Recipe::map_nbytes];
  int64_t last_extent;
};

// A tensor that a configuration's pre_hook zeroes before each launch: its place in the signature,
// among the arguments that are given, and of its address in the call's words.
struct Cleared {
  size_t parameter, argument, word;
};

// What a call with one key launches.
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
  std::vector<uint32_t> offsets;                // of each parameter in the call's words, in bytes
  std::vector<uint32_t> defaults, fixes, made;  // slots that are not simply the call's
  std::vector<uint32_t> descriptors;            // the first slot of each
  bool plain = true;                            // there are none of them
  std::vector<Cleared> cleared;
  std::vector<Recipe> recipes;
  int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,
                const uint32_t*, int, int, int, int) = nullptr;

  bool is_of(const Call& call) const {
    const uint64_t *words = call.words.data(), *known = key.data(), *masks = mask->data();
    uint64_t different = 0;
    for (size_t k = 0, n = key.size(); k < n; ++k) different |= (words[k] & masks[k]) ^ known[k];
    return different == 0 && std::equal(call.strings.begin(), call.strings.end(), strings.begin());
  }

  // Before a launch; false if it must be known how long the arguments are.
  bool clear(const uint64_t* words, std::span<const uint64_t> nbytes, Stream stream) const;

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
    for (const uint32_t k : defaults)
      parameters[k] = const_cast<uint64_t*>(&specialization.defaults[slots[k].word]);
    const auto* states = reinterpret_cast<const uint8_t*>(words + n_head_words);
    for (const uint32_t k : fixes)
      fix(slots[k], *signature, states[slots[k].leaf], reinterpret_cast<uint64_t*>(parameters[k]));
    for (const uint32_t k : descriptors) {
      // The base is in the word after the type, which is where a map would be.
      const Fields fields(reinterpret_cast<const uint64_t*>(parameters[k]) - (slots[k].map < 0));
      if (const char* wrong = fields.wrong(state::type_of(states[slots[k].leaf])))
        refuse(slots[k], wrong);
      if (slots[k].map >= 0)
        make(maps[slots[k].map], recipes[static_cast<size_t>(slots[k].map)], fields);
    }
    for (const uint32_t k : made) {
      TensorMap& map = maps[slots[k].map];
      parameters[k] =
          slots[k].nbytes == Recipe::map_nbytes ? static_cast<void*>(map.bytes) : &map.last_extent;
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
    const Launched launched{function->name,
                            facts.symbol,
                            specialization.text,
                            facts.num_warps,
                            facts.num_ctas,
                            facts.shared,
                            grid,
                            stream};
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

  [[noreturn]] void refuse(const Slot& slot, const char* why) const;
  void make(TensorMap& map, const Recipe& recipe, const Fields& fields) const;
  Memory scratch(const Launched& launched, int64_t nbytes, int64_t alignment) const;
};

inline uint64_t hash_of(const std::vector<uint64_t>& mask, size_t n, const uint64_t* words) {
  constexpr uint64_t mix = 0x9e3779b97f4a7c15;
  uint64_t h = 0;
  for (size_t k = 0; k < n; ++k) h = std::rotl((h ^ (words[k] & mask[k])) * mix, 29);
  return h * mix;
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

struct Asked;
struct WantsLengths {};

// One function called with one list of types at one place.
struct Site {
  Site(const cuda::Driver& driver, const Function* function, std::span<const Leaf> leaves)
      : driver(driver),
        function(function),
        signature(function->signature()),
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
  std::unique_ptr<Record> prepare(const Asked& asked, const Settings& chosen,
                                  bool timed = false) const;
  Settings decide(Asked& asked, size_t layer, Settings chosen) const;
  Settings with_config(const Asked& asked, size_t layer, Settings chosen,
                       const Settings& config) const;
  std::string ask(const Asked& asked, const std::string& kind, const Settings& chosen) const;
  Settings tune(Asked& asked, size_t layer, const Settings& chosen) const;
  std::vector<Settings> candidates_of(Asked& asked, size_t layer, const Settings& chosen,
                                      const std::vector<Settings>& configs) const;
  std::vector<Kept> kept_of(const Asked& asked, const Layer& layer) const;
  void compile_all(const Asked& asked, const std::vector<Settings>& candidates) const;
  std::vector<double> time(const Asked& asked, const Layer& layer,
                           const std::vector<Settings>& candidates) const;
  Request request_of(const Asked& asked, const Specialization& specialization,
                     const Settings& chosen) const;
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

Site& site_of(Sites& sites, const Call& call);
// Null: it must be known how long the arguments are.
const Record* find(Sites& sites, const Call& call);

template <class T>
T* aligned(void* memory) {
  return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory) + alignof(T) - 1) / alignof(T) *
                              alignof(T));
}

}  // namespace plait::triton::detail
