// triton_launch/src/bound.cpp: launches that are resolved and kept: run again, changed, made nodes
// of graphs; and kernels that are prepared.
#include <alloca.h>

#include <cstring>

#include "site.h"

namespace plait::triton::detail {

struct Plan {
  Plan(Sites& sites, const Call& call)
      : sites(sites),
        launch(call.launch),
        texts(call.strings.begin(), call.strings.end()),
        strings(texts.begin(), texts.end()),
        given(call.words.begin(), call.words.end()),
        grid(launch.grid),
        nbytes(call.nbytes.begin(), call.nbytes.end()),
        call{call.function, launch, call.leaves, given, strings, nbytes} {}

  // Finds the kernel of the words that are given; false: it must be known how long the arguments
  // are.
  bool resolve() {
    if (!launch.rule.call && is_empty(grid)) return true;
    if (!record || !record->is_of(call)) record = find(sites, call);
    call.nbytes = {};
    if (!record || (!record->cleared.empty() && nbytes.empty())) return false;
    grid = record->grid_of(call);
    if (is_empty(grid)) return true;
    words = given;
    config = record->config_of(grid);
    parameters.resize(record->offsets.size() + 2);
    maps.resize(record->recipes.size());
    record->address(words.data(), parameters.data(), maps.data());
    return true;
  }

  // Gives a thread that has no context the one that this belongs to; says whether it had none.
  // Throws Error if it has another one.
  bool enter() const {
    if (!record) return false;  // nothing was launched: it belongs to none yet
    const cuda::Driver& driver = *record->driver;
    return told(call.function->name, record->specialization.text, [&] {
      const uint64_t mine = record->key[0], current = current_context(driver);
      if (current == mine) return false;
      if (current != 0)
        throw std::runtime_error("another context is current than the one that it was bound in");
      driver.check(driver.set_context(reinterpret_cast<void*>(mine)), "cuCtxSetCurrent");
      return true;
    });
  }

  Sites& sites;
  const Launch launch;
  const std::vector<std::string> texts;
  const std::vector<std::string_view> strings;
  std::vector<uint64_t> given, words;  // as the call has them, and as the kernel takes them
  const Record* record = nullptr;      // null: the grid is empty
  Grid grid;
  const std::vector<uint64_t> nbytes;
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
  const auto run = [&] {
    std::memcpy(parameters, plan.parameters.data(), n * sizeof(void*));
    cuda::Config config = plan.config;
    plan.record->clear(plan.given.data(), plan.nbytes, stream);
    plan.record->launch(plan.grid, config, stream, parameters);
  };
  try {
    run();
  } catch (const Error&) {  // asked only now: a launch has no time to look for its context
    if (!plan.enter()) throw;
    run();
  }
}

void change(Plan& plan, size_t leaf, std::span<const uint8_t> states, size_t word,
            std::span<const uint64_t> words) {
  const size_t first = n_head_words + n_state_words(plan.call.leaves.size());
  plan.enter();
  const std::vector<uint64_t> before = plan.given;
  std::copy(states.begin(), states.end(),
            reinterpret_cast<uint8_t*>(plan.given.data() + n_head_words) + leaf);
  std::copy(words.begin(), words.end(),
            plan.given.begin() + static_cast<std::ptrdiff_t>(first + word));
  try {
    const auto is_here = [&](const Cleared& c) {
      return c.word - first >= word && c.word - first < word + words.size();
    };
    if (plan.record &&
        std::any_of(plan.record->cleared.begin(), plan.record->cleared.end(), is_here))
      throw Error("a tensor that a pre_hook zeroes cannot be set: bind again",
                  plan.call.function->name);
    if (!plan.resolve())
      throw Error(
          "a value that was set has no tuned configuration yet, and resets or restores tensors: "
          "launch it once",
          plan.call.function->name);
  } catch (...) {
    std::copy(before.begin(), before.end(), plan.given.begin());
    plan.resolve();  // launches what it did
    throw;
  }
}

namespace {
// What a graph's node launches: it has no memory of its own for scratch.
cuda::NodeParams node_of(const Plan& plan, void** parameters) {
  const cuda::KernelFacts* facts = is_empty(plan.grid) ? nullptr : &plan.record->kernel->facts();
  if (!facts || facts->global_scratch != 0 || facts->profile_scratch != 0 ||
      !plan.record->cleared.empty())
    throw Error(facts ? "a kernel with scratch memory, or a pre_hook that zeroes, is no node of "
                        "its own: capture its launch"
                      : "a launch with an empty grid is no node of a graph",
                plan.call.function->name);
  plan.enter();  // a node gets the current one
  static void* none = nullptr;
  std::copy(plan.parameters.begin(), plan.parameters.end() - 2, parameters);
  std::fill_n(parameters + plan.parameters.size() - 2, 2, &none);
  return plan.record->kernel->node_of(plan.config, parameters);
}
}  // namespace

CUgraphNode_st* add_node(const Plan& plan, CUgraph_st* graph,
                         std::span<CUgraphNode_st* const> dependencies) {
  auto** parameters = static_cast<void**>(alloca(plan.parameters.size() * sizeof(void*)));
  const cuda::NodeParams params = node_of(plan, parameters);
  int (*add)(CUgraphNode_st**, CUgraph_st*, CUgraphNode_st* const*, size_t,
             const cuda::NodeParams*);
  int (*set)(CUgraphNode_st*, int, const void*);
  CUgraphNode_st* node = nullptr;
  told(plan.call.function->name, plan.record->specialization.text, [&] {
    const cuda::Driver& driver = *plan.record->driver;
    driver.need(add, "cuGraphAddKernelNode_v2");
    driver.need(set, "cuGraphKernelNodeSetAttribute");
    driver.check(add(&node, graph, dependencies.data(), dependencies.size(), &params),
                 "cuGraphAddKernelNode");
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
    plan.record->driver->check(
        plan.record->driver->set_node(reinterpret_cast<cuda::GraphExec>(graph),
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
  for (size_t k = 0, word = n_head_words + n_state_words(call.leaves.size());
       k < call.leaves.size(); ++k) {
    const Leaf& leaf = call.leaves[k];
    const auto source =
        std::find(site->binding.sources.begin(), site->binding.sources.end(), static_cast<int>(k));
    if (source != site->binding.sources.end())  // else it is in a tuple
      parameter =
          site->signature.parameters[static_cast<size_t>(source - site->binding.sources.begin())]
              .name;
    if (leaf.varies && leaf.kind == Kind::integer &&
        std::find(names.begin(), names.end(), parameter) != names.end())
      throw Error("a decorator decides by " + parameter + ": it cannot vary", call.function->name);
    if (leaf.varies && (leaf.kind == Kind::integer || leaf.kind == Kind::pointer) &&
        !(states[k] & state::none))
      varying.push_back({k, word, states[k]});
    word += leaf.n_words();
  }
  size_t n = 1;
  for (const Choice& c : varying) n *= call.leaves[c.leaf].kind == Kind::integer ? 3 : 2;
  if (n > most)
    throw Error("they would be " + std::to_string(n) + " kernels, " + std::to_string(most) +
                    " at most are prepared",
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
      states[c.leaf] = static_cast<uint8_t>((c.state & ~kinds) | (kind == 1   ? state::aligned
                                                                  : kind == 2 ? state::one
                                                                              : 0));
      if (is_integer) call.words[c.word] = kind == 1 ? 16 : kind == 2 ? 1 : 2;
    }
    const Record* record = find(sites, call);
    if (!record)
      throw Error("it is not tuned yet, and resets or restores tensors: launch it once",
                  call.function->name);
    found.push_back(record);
  }
  const auto by_kernel = [](const Record* a, const Record* b) { return a->kernel < b->kernel; };
  std::sort(found.begin(), found.end(), by_kernel);
  return 1 + static_cast<size_t>(std::count_if(found.begin() + 1, found.end(),
                                               [&, last = found[0]](const Record* r) mutable {
                                                 return std::exchange(last, r)->kernel != r->kernel;
                                               }));
}

void destroy(Plan* plan) { delete plan; }

}  // namespace plait::triton::detail
