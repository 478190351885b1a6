// plait/triton.h: Triton kernels from C++ for what a bare launch costs.
//
//   auto add = plait::triton::from_pack("kernels.pack", "add_kernel");
//   add[{blocks, stream}](x, y, out, n, plait::constexpr_<1024>);
//   auto bound = add.bind({blocks}, x, y, out, n, plait::arg<"BLOCK"> = 1024);
//   bound(stream);
//
// Needs neither torch nor Python nor CUDA's headers. triton_launch/README.md is for users. A launch
// passes three borders, a header each: its arguments become leaves and words
// (plait/triton/arguments.h), what stands in brackets says where it runs (plait/triton/launch.h),
// and the first one of its kind gets a kernel from somewhere (plait/triton/providers.h).
//
// Between them, a call's words are: context, options, the leaves' bytes, the values. A mask that
// the Python signature gives (constexpr, do_not_specialize, annotations) makes them the key; all
// values that the answer of a decorator depends on are part of it. The same types on the same
// function are a Site: its last record, then its table, are looked at without a lock. Sites,
// records and functions are never freed.
#pragma once

#include <atomic>
#include <vector>

#include "plait/triton/launch.h"
#include "plait/triton/providers.h"

struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;

namespace plait::triton {

// What is told of a launch; see set_hooks.
struct Launched {
  std::string_view kernel, symbol, specialization;
  uint32_t num_warps, num_ctas, shared;
  Grid grid;
  Stream stream;
};
struct Hooks {
  void (*enter)(void* user, const Launched&) = nullptr;
  void (*exit)(void* user, const Launched&) = nullptr;
  void* user = nullptr;
};
// Called around every launch from now on; nullptr: no more. What it points to must stay.
PLAIT_API void set_hooks(const Hooks* hooks);

// Scratch memory of kernels that want some, ordered as the stream is. Without one, the driver's
// cuMemAllocAsync serves. free may be null.
struct Scratch {
  void* (*allocate)(void* user, size_t nbytes, size_t alignment, Stream stream);
  void (*free)(void* user, void* memory, Stream stream);
  void* user = nullptr;
};
PLAIT_API void set_scratch(const Scratch* scratch);

// What happens to a call of an @triton.autotune function whose key was not met before. tune: its
// configurations are timed. first: it gets the first one.
enum class Miss : uint8_t { tune, first, error };
// folder: where choices are kept; null: $PLAIT_CACHE_DIR/tuned or ~/.cache/plait/tuned; "":
// nowhere.
struct Tuning {
  Miss on_miss = Miss::tune;
  const char* folder = nullptr;
};
// What it points to must stay; null: as by default.
PLAIT_API void set_tuning(const Tuning* tuning);

namespace detail {
class Function;
struct Site;
struct Plan;

// The functions that were called with the same types at one place of the program's code.
struct Sites {
  static constexpr size_t n_quick = 8;
  std::atomic<Site*> quick[n_quick]{};
  std::atomic<Site*> all{};
};

// words: context, options, other options, the leaves' states, their values.
inline constexpr size_t n_head_words = 3;
constexpr size_t n_state_words(size_t n_leaves) { return (n_leaves + 7) / 8; }
struct Call {
  const Function* function;
  const Launch& launch;
  std::span<const Leaf> leaves;
  std::span<uint64_t> words;
  std::span<const std::string_view> strings;
  std::span<const uint64_t> nbytes = {};  // of each argument
};

template <class T>
uint64_t nbytes_of(const T& v) {
  if constexpr (requires { TraitsOf<T>::nbytes(v); }) return TraitsOf<T>::nbytes(v);
  return 0;
}

template <class... A>
struct Frame {
  static constexpr auto leaves = concatenate(TraitsOf<A>::leaves...);
  static constexpr size_t n_values = [] {
    size_t n = 0;
    for (const Leaf& leaf : leaves) n += leaf.n_words();
    return n;
  }();
  static constexpr size_t n_strings =
      std::count_if(leaves.begin(), leaves.end(), [](const Leaf& leaf) { return leaf.has_text(); });
  static constexpr size_t first_value = n_head_words + n_state_words(leaves.size());

  explicit Frame(const A&... arguments) {
    if constexpr (!leaves.empty()) words[first_value - 1] = 0;  // the bytes beyond the last leaf's
    [[maybe_unused]] Writer w{reinterpret_cast<uint8_t*>(words.data() + n_head_words),
                              words.data() + first_value, strings.data()};
    (TraitsOf<A>::write(w, arguments), ...);
  }
  Call call(const Function* function, const Launch& launch) {
    return {function, launch, leaves, words, strings};
  }

  // Leaves and words before those of argument n.
  static consteval std::pair<size_t, size_t> before(size_t n) {
    constexpr std::array<size_t, sizeof...(A)> n_leaves{TraitsOf<A>::leaves.size()...};
    std::pair<size_t, size_t> at;
    for (size_t k = 0; k < n; ++k)
      for (size_t j = 0; j < n_leaves[k]; ++j) at.second += leaves[at.first++].n_words();
    return at;
  }

  std::array<uint64_t, first_value + n_values> words;
  std::array<std::string_view, n_strings> strings;
};

// These two return false and null if they must know how long the arguments are.
PLAIT_API bool launch(Sites& sites, const Call& call);
PLAIT_API Plan* bind(Sites& sites, const Call& call);
PLAIT_API void launch(const Plan& plan, Stream stream);
PLAIT_API void change(Plan& plan, size_t leaf, std::span<const uint8_t> states, size_t word,
                      std::span<const uint64_t> words);
PLAIT_API CUgraphNode_st* add_node(const Plan& plan, CUgraph_st* graph,
                                   std::span<CUgraphNode_st* const> dependencies);
PLAIT_API void update_node(const Plan& plan, CUgraphExec_st* graph, CUgraphNode_st* node);
PLAIT_API size_t prepare(Sites& sites, const Call& call);
PLAIT_API void destroy(Plan* plan);
PLAIT_API std::string value_text(std::span<const Leaf> leaves, std::span<const uint64_t> words,
                                 std::span<const std::string_view> strings);
}  // namespace detail

template <class T>
Option::Option(std::string_view name, const T& value) : name(name) {
  const detail::Frame<T> frame(value);
  this->value = detail::value_text(frame.leaves, frame.words, frame.strings);
}

// A launch that is resolved: kernel, arguments and grid are fixed. Threads may share it. Belongs to
// the context that was current when it was bound: a thread that has none gets this one, in another
// one it is an error.
class Bound {
 public:
  explicit Bound(detail::Plan* plan) : plan_(plan, detail::destroy) {}
  void operator()(Stream stream) const { detail::launch(*plan_, stream); }

  // A node of a graph that launches it.
  CUgraphNode_st* add_to(CUgraph_st* graph,
                         std::span<CUgraphNode_st* const> dependencies = {}) const {
    return detail::add_node(*plan_, graph, dependencies);
  }
  // Makes such a node, or one that capturing it made, launch it as it is now.
  void update(CUgraphExec_st* graph, CUgraphNode_st* node) const {
    detail::update_node(*plan_, graph, node);
  }

 protected:
  std::unique_ptr<detail::Plan, void (*)(detail::Plan*)> plan_;
};

// The same, and its arguments may be changed.
template <class... A>
class BoundTo : public Bound {
 public:
  using Bound::Bound;

  // Gives argument I another value; no thread may launch it meanwhile. A value that another kernel
  // is compiled for is looked up, and that one compiled if need be. A grid's function is asked
  // again.
  template <size_t I, class T>
  void set(const T& value) {
    using Given = std::tuple_element_t<I, std::tuple<TraitsOf<A>...>>;
    constexpr auto& leaves = TraitsOf<T>::leaves;
    constexpr bool fits =
        std::equal(leaves.begin(), leaves.end(), Given::leaves.begin(), Given::leaves.end(),
                   [](const Leaf& a, const Leaf& b) {
                     return a.kind == b.kind && a.constant == b.constant && !a.has_text();
                   });
    static_assert(fits,
                  "a bound argument may only be set to a value of its own kind, and to no string: "
                  "bind again");
    constexpr std::pair<size_t, size_t> at = detail::Frame<A...>::before(I),
                                        n = detail::Frame<T>::before(1);
    std::array<uint8_t, n.first> states;
    std::array<uint64_t, n.second> words;
    Writer w{states.data(), words.data(), nullptr};
    TraitsOf<T>::write(w, value);
    detail::change(*plan_, at.first, states, at.second, words);
  }
};

// A Triton function: a name that may be copied and used by any thread.
class Kernel {
 public:
  explicit Kernel(const detail::Function* function) : function_(function) {}

  struct Launcher {
    template <class... A>
    void operator()(const A&... arguments) const {
      static constinit detail::Sites sites;
      detail::Frame<A...> frame(arguments...);
      detail::Call call = frame.call(function, launch);
      if (detail::launch(sites, call)) [[likely]]
        return;
      const std::array<uint64_t, sizeof...(A)> nbytes{detail::nbytes_of(arguments)...};
      call.nbytes = nbytes;
      detail::launch(sites, call);
    }
    const detail::Function* function;
    Launch launch;
  };
  Launcher operator[](const Launch& launch) const { return {function_, launch}; }

  template <class... A>
  BoundTo<A...> bind(const Launch& launch, const A&... arguments) const {
    static constinit detail::Sites sites;
    detail::Frame<A...> frame(arguments...);
    detail::Call call = frame.call(function_, launch);
    detail::Plan* plan = detail::bind(sites, call);
    const std::array<uint64_t, sizeof...(A)> nbytes{plan ? 0 : detail::nbytes_of(arguments)...};
    call.nbytes = nbytes;
    return BoundTo<A...>(plan ? plan : detail::bind(sites, call));
  }

  // Compiles and loads what such a call launches, for all kinds of values of the arguments that
  // plait::vary marks. Says how many kernels that are.
  template <class... A>
  size_t prepare(const Launch& launch, const A&... arguments) const {
    static constinit detail::Sites sites;
    detail::Frame<A...> frame(arguments...);
    return detail::prepare(sites, frame.call(function_, launch));
  }

 private:
  const detail::Function* function_;
};

// The same file and function of the same provider are one kernel. Nothing is compiled yet.
PLAIT_API Kernel jit(const std::string& file, const std::string& function,
                     std::shared_ptr<Provider> provider = worker());
PLAIT_API Kernel from_pack(std::shared_ptr<Provider> pack, const std::string& function);
// A path is opened once.
PLAIT_API Kernel from_pack(const std::string& path, const std::string& function);

// What is compiled or was found in packs so far, a signature each as `python -m plait.tools.pack`
// takes it: a warmed program's list makes the pack that it needs; what decorators decided is in it,
// too.
PLAIT_API std::vector<std::string> signatures();
// The same, line by line to a file as it happens; $PLAIT_TRITON_RECORD is one from the start. "":
// no more.
PLAIT_API void record_to(const std::string& path);

// What calls of this process met. hits: counted from count_hits(true) on. misses: calls whose key
// was new to their place in the program. last_miss: the kernel and its specialization, and that of
// the call before it.
struct Stats {
  uint64_t hits, misses, compiled, loaded, tuned;
  std::string last_miss;
};
PLAIT_API Stats stats();
PLAIT_API void count_hits(bool on);

}  // namespace plait::triton

namespace plait {
template <auto V>
inline constexpr triton::Constant<std::remove_const_t<decltype(V)>> constexpr_{V};
template <class T>
triton::Constant<T> constexpr_value(T value) {
  return {std::move(value)};
}
template <triton::detail::Name N>
inline constexpr triton::detail::Keyword<N> arg{};
template <class T>
triton::Varying<T> vary(const T& value) {
  return {value};
}
}  // namespace plait
