// triton_launch/src/c_abi.cpp: the functions of plait/triton_c.h, by those of plait/triton.h. No
// exception leaves them: a status does, and the last error is kept for its thread.
#include <alloca.h>

#include <map>
#include <mutex>

#include "c_arguments.h"

using namespace plait::triton;
using namespace plait::triton::c;

namespace {
// A kernel has 4 KiB of parameters, more on new devices.
constexpr uint32_t kMaxArguments = 1 << 12;

struct Said {
  std::string message, kernel, specialization, traceback;
  plait_triton_error error;
};
thread_local Said said;
thread_local const plait_triton_error* last = nullptr;

plait_triton_status tell(plait_triton_status status, const char* message,
                         const Error* error = nullptr) noexcept {
  static constexpr plait_triton_error no_memory{"no memory", "", "", "", -1};
  try {
    said = {message,
            error ? error->kernel : "",
            error ? error->specialization : "",
            error ? error->traceback : "",
            {}};
    said.error = {said.message.c_str(), said.kernel.c_str(), said.specialization.c_str(),
                  said.traceback.c_str(), error ? error->argument : -1};
    last = &said.error;
    return status;
  } catch (...) {
    last = &no_memory;
    return PLAIT_TRITON_NO_MEMORY;
  }
}

template <class F>
plait_triton_status guarded(F f) noexcept {
  try {
    f();
    return PLAIT_TRITON_OK;
  } catch (const Error& error) {
    return tell(PLAIT_TRITON_ERROR, error.what(), &error);
  } catch (const Invalid& error) {
    return tell(PLAIT_TRITON_INVALID, error.what());
  } catch (const std::bad_alloc&) {
    return tell(PLAIT_TRITON_NO_MEMORY, "no memory");
  } catch (const std::exception& error) {
    return tell(PLAIT_TRITON_ERROR, error.what());
  } catch (...) {
    return tell(PLAIT_TRITON_ERROR, "an exception of no known kind");
  }
}

}  // namespace

struct plait_triton_kernel {
  plait_triton_kernel(const Kernel& kernel, std::string name)
      : function(kernel[{1}].function), name(std::move(name)) {}

  // The shape of these arguments, which are written to w.
  Shape& write(Given arguments, const Writer& w) {
    Shape* found = last.load(std::memory_order_acquire);
    if (found && found->write(arguments, w)) [[likely]]
      return *found;
    found = search(arguments, w);
    if (!found) found = make(arguments, w);
    last.store(found, std::memory_order_release);
    return *found;
  }

  const detail::Function* const function;
  const std::string name;

 private:
  Shape* search(Given arguments, const Writer& w) const {
    Shape* found = all.load(std::memory_order_acquire);
    while (found && !found->write(arguments, w)) found = found->next;
    return found;
  }
  Shape* make(Given arguments, const Writer& w) {
    auto made = std::make_unique<Shape>(arguments);
    const std::scoped_lock lock(mutex);
    if (Shape* found = search(arguments, w)) return found;
    made->write(arguments, w);
    made->next = all.load(std::memory_order_relaxed);
    all.store(made.get(), std::memory_order_release);
    return made.release();
  }

  std::atomic<Shape*> last{}, all{};
  std::mutex mutex;
};

struct plait_triton_bound : Bound {
  plait_triton_bound(detail::Plan* plan, const Shape& shape) : Bound(plan), shape(shape) {}

  void set(size_t index, const plait_triton_argument& value) {
    need(index < shape.leaves.size(), "there is no argument of that index");
    const Leaf& leaf = shape.leaves[index];
    need(kind_of(value.kind) == leaf.kind && leaf.kind != Kind::tuple && !leaf.has_text(),
         "a bound argument may only be set to a value of its own kind, and to no text or tuple: "
         "bind again");
    size_t word = 0;
    for (size_t k = 0; k < index; ++k) word += shape.leaves[k].n_words();
    uint8_t state = 0;
    std::array<uint64_t, 16> words;
    put({&state, words.data(), nullptr}, value);
    detail::change(*plan_, index, {&state, 1}, word, {words.data(), leaf.n_words()});
  }

  const Shape& shape;
};

namespace {
plait_triton_kernel* c_kernel(const Kernel& kernel, const char* name) {
  static std::mutex mutex;
  static auto* all = new std::map<const detail::Function*, plait_triton_kernel>;
  const std::scoped_lock lock(mutex);
  return &all->try_emplace(kernel[{1}].function, kernel, name).first->second;
}

int16_t option(int16_t value) { return value == 0 ? int16_t{-1} : value; }

const OptionSet* of(const plait_triton_options* set) {
  return reinterpret_cast<const OptionSet*>(set);
}

// A grid that the caller's function says.
struct GridOf {
  decltype(plait_triton_config::grid_of) function;
  void* user;
  const plait_triton_kernel* kernel;

  Grid operator()(const Meta& meta) const {
    int64_t grid[3] = {1, 1, 1};
    const plait_triton_error* before = std::exchange(last, nullptr);
    if (function(user, reinterpret_cast<const plait_triton_meta*>(&meta), grid) != PLAIT_TRITON_OK)
      throw Error(std::string("its grid's function failed") + (last ? ": " : "") +
                      (last ? last->message : ""),
                  kernel->name);
    last = before;
    return {grid[0], grid[1], grid[2]};
  }
};

// Calls f with the call that is described; again with the lengths of arguments if it says false.
template <class F>
void with_call(plait_triton_kernel* kernel, const plait_triton_config* config,
               const plait_triton_argument* arguments, size_t n, F f) {
  need(kernel && config && (arguments || n == 0),
       "the kernel, the configuration or the arguments are NULL");
  need(config->size >= sizeof *config && config->reserved == 0,
       "the configuration is of no known version");
  need(n <= kMaxArguments, "too many arguments");
  const Given all(arguments, n);
  const size_t first = detail::n_head_words + detail::n_state_words(n);
  auto* words = static_cast<uint64_t*>(
      alloca((first + n * Leaf{Kind::descriptor}.n_words()) * sizeof(uint64_t)));
  auto* strings = static_cast<std::string_view*>(alloca(n * sizeof(std::string_view)));
  words[first - 1] = 0;  // the bytes beyond the last state
  Shape& shape = kernel->write(
      all, {reinterpret_cast<uint8_t*>(words + detail::n_head_words), words + first, strings});
  const size_t n_words = first + shape.n_values;
  const Options options{option(config->num_warps), option(config->num_stages),
                        option(config->num_ctas),  option(config->maxnreg),
                        config->cooperative != 0,  config->pdl != 0,
                        of(config->others)};
  const Launch launch =
      config->grid_of
          ? Launch(GridOf{config->grid_of, config->user, kernel}, config->stream, options)
          : Launch({config->grid[0], config->grid[1], config->grid[2]}, config->stream, options);
  detail::Call call{
      kernel->function, launch, shape.leaves, {words, n_words}, {strings, shape.n_strings}};
  if (f(shape, call)) [[likely]]
    return;
  std::vector<uint64_t> nbytes;
  for (size_t k = 0; k < n; k += 1 + shape.leaves[k].n_inside)
    nbytes.push_back(arguments[k].kind == PLAIT_TRITON_POINTER ? arguments[k].n : 0);
  call.nbytes = nbytes;
  f(shape, call);
}

template <class T>
T* there(T* given) {
  need(given, "a text, or where a result goes, is NULL");
  return given;
}

// Hooks of C, called with C's structure.
struct CHooks {
  plait_triton_hooks given;
  Hooks hooks{enter, exit, this};

  static void enter(void* self, const Launched& l) { call(self, &plait_triton_hooks::enter, l); }
  static void exit(void* self, const Launched& l) { call(self, &plait_triton_hooks::exit, l); }
  static void call(void* self,
                   void (*plait_triton_hooks::*which)(void*, const plait_triton_launched*),
                   const Launched& l) {
    const plait_triton_hooks& h = static_cast<CHooks*>(self)->given;
    if (!(h.*which)) return;
    // The views are of whole strings, which end with a zero.
    const plait_triton_launched launched{
        l.kernel.data(), l.symbol.data(), l.specialization.data(),        l.num_warps,
        l.num_ctas,      l.shared,        {l.grid.x, l.grid.y, l.grid.z}, l.stream};
    (h.*which)(h.user, &launched);
  }
};
}  // namespace

uint32_t plait_triton_abi() { return PLAIT_TRITON_ABI; }

const plait_triton_error* plait_triton_last_error() { return last; }

plait_triton_status plait_triton_jit(const char* file, const char* function, const char* python,
                                     plait_triton_kernel** kernel) {
  return guarded([&] {
    *there(kernel) = c_kernel(jit(there(file), there(function),
                                  !python   ? worker()
                                  : *python ? worker(python)
                                            : embedded()),
                              function);
  });
}

plait_triton_status plait_triton_from_pack(const char* path, const char* function,
                                           plait_triton_kernel** kernel) {
  return guarded([&] {
    *there(kernel) = c_kernel(from_pack(std::string(there(path)), there(function)), function);
  });
}

plait_triton_status plait_triton_meta_get(const plait_triton_meta* meta, const char* parameter,
                                          int64_t* value) {
  return guarded(
      [&] { *there(value) = (*reinterpret_cast<const Meta*>(there(meta)))[there(parameter)]; });
}

plait_triton_status plait_triton_option_set(const plait_triton_argument* options, size_t n,
                                            const plait_triton_options** set) {
  return guarded([&] {
    need(options || n == 0, "the options are NULL");
    std::vector<Option> made;
    for (const plait_triton_argument& o : Given(options, n)) {
      const std::string_view name = there(o.name);
      switch (o.kind) {
        case PLAIT_TRITON_NONE: made.emplace_back(name, std::nullopt); break;
        case PLAIT_TRITON_INTEGER: made.emplace_back(name, o.value.integer); break;
        case PLAIT_TRITON_NATURAL: made.emplace_back(name, o.value.natural); break;
        case PLAIT_TRITON_NUMBER: made.emplace_back(name, o.value.number); break;
        case PLAIT_TRITON_BOOLEAN: made.emplace_back(name, o.value.integer != 0); break;
        case PLAIT_TRITON_STRING:
          made.emplace_back(name, std::string_view(there(o.value.string), o.n));
          break;
        default: throw Invalid("an option is None, a number, a bool or a text");
      }
    }
    *there(set) = reinterpret_cast<const plait_triton_options*>(option_set(made));
  });
}

plait_triton_status plait_triton_launch(plait_triton_kernel* kernel,
                                        const plait_triton_config* config,
                                        const plait_triton_argument* arguments, size_t n) {
  return guarded([&] {
    with_call(kernel, config, arguments, n, [](Shape& shape, const detail::Call& call) {
      return detail::launch(shape.sites, call);
    });
  });
}

plait_triton_status plait_triton_prepare(plait_triton_kernel* kernel,
                                         const plait_triton_config* config,
                                         const plait_triton_argument* arguments, size_t n) {
  return guarded([&] {
    with_call(kernel, config, arguments, n, [](Shape& shape, const detail::Call& call) {
      detail::prepare(shape.sites, call);
      return true;
    });
  });
}

plait_triton_status plait_triton_bind(plait_triton_kernel* kernel,
                                      const plait_triton_config* config,
                                      const plait_triton_argument* arguments, size_t n,
                                      plait_triton_bound** bound) {
  return guarded([&] {
    there(bound);
    with_call(kernel, config, arguments, n, [&](Shape& shape, const detail::Call& call) {
      detail::Plan* plan = detail::bind(shape.sites, call);
      if (plan) *bound = new plait_triton_bound(plan, shape);
      return plan != nullptr;
    });
  });
}

plait_triton_status plait_triton_bound_launch(const plait_triton_bound* bound,
                                              plait_triton_stream stream) {
  return guarded([&] { (*there(bound))(stream); });
}

plait_triton_status plait_triton_bound_set(plait_triton_bound* bound, size_t index,
                                           const plait_triton_argument* value) {
  return guarded([&] { there(bound)->set(index, *there(value)); });
}

plait_triton_status plait_triton_bound_add_to(const plait_triton_bound* bound, CUgraph_st* graph,
                                              CUgraphNode_st* const* behind, size_t n_behind,
                                              CUgraphNode_st** node) {
  return guarded([&] {
    need(behind || n_behind == 0, "the nodes that it is behind are NULL");
    *there(node) = there(bound)->add_to(graph, {behind, n_behind});
  });
}

plait_triton_status plait_triton_bound_update(const plait_triton_bound* bound,
                                              CUgraphExec_st* graph, CUgraphNode_st* node) {
  return guarded([&] { there(bound)->update(graph, node); });
}

void plait_triton_bound_free(plait_triton_bound* bound) { delete bound; }

// What is set stays, like what plait/triton.h is given: a launch may be reading it.
plait_triton_status plait_triton_set_scratch(const plait_triton_scratch* s) {
  return guarded([&] { set_scratch(s ? new Scratch{s->allocate, s->free, s->user} : nullptr); });
}

plait_triton_status plait_triton_set_hooks(const plait_triton_hooks* hooks) {
  return guarded([&] { set_hooks(hooks ? &(new CHooks{*hooks})->hooks : nullptr); });
}

plait_triton_status plait_triton_set_tuning(plait_triton_miss on_miss, const char* folder) {
  return guarded([&] {
    need(on_miss >= PLAIT_TRITON_MISS_TUNE && on_miss <= PLAIT_TRITON_MISS_ERROR,
         "there is no such policy");
    const char* kept = folder ? (new std::string(folder))->c_str() : nullptr;
    set_tuning(new Tuning{static_cast<Miss>(on_miss), kept});
  });
}

namespace {
// What fits of a text.
void copy(const std::string& text, char* to, size_t size) {
  if (size == 0) return;
  const size_t n = std::min(size - 1, text.size());
  std::memcpy(there(to), text.data(), n);
  to[n] = 0;
}
}  // namespace

plait_triton_status plait_triton_signatures(char* to, size_t size, size_t* needed) {
  return guarded([&] {
    std::string all;
    for (const std::string& signature : signatures()) all += signature + "\n";
    *there(needed) = all.size() + 1;
    copy(all, to, size);
  });
}

plait_triton_status plait_triton_stats(plait_triton_counts* counts, char* last_miss, size_t size) {
  return guarded([&] {
    const Stats now = stats();
    *there(counts) = {now.hits, now.misses, now.compiled, now.loaded, now.tuned};
    copy(now.last_miss, last_miss, size);
  });
}

void plait_triton_count_hits(int on) { count_hits(on != 0); }
