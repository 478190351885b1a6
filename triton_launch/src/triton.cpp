// triton_launch/src/triton.cpp: from a call to a launch, and the interface of what is around it.
// What a hit does is launch(Sites&, Call) down to Record::launch.
#include <alloca.h>

#include "site.h"

namespace plait::triton {
namespace detail {
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

void head(const cuda::Driver& driver, const Call& call) {
  const Options& o = call.launch.options;
  const auto half = [](int16_t v, int at) { return uint64_t{static_cast<uint16_t>(v)} << at; };
  call.words[0] = current_context(driver);
  call.words[1] =
      half(o.num_warps, 0) | half(o.num_stages, 16) | half(o.num_ctas, 32) | half(o.maxnreg, 48);
  call.words[2] = address(o.others) | o.cooperative | uint64_t{o.pdl} << 1;
}
}  // namespace

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

bool launch(Sites& sites, const Call& call) {
  if (is_empty(call.launch.grid)) return true;
  const Record* found = find(sites, call);
  if (!found) return false;
  const Record& record = *found;
  const Grid grid = record.grid_of(call);
  if (call.launch.rule.call && is_empty(grid)) return true;
  if (!record.cleared.empty() && !record.clear(call.words.data(), call.nbytes, call.launch.stream))
    return false;
  auto** parameters = static_cast<void**>(alloca((record.offsets.size() + 2) * sizeof(void*)));
  const size_t n_maps = record.recipes.size();
  auto* maps = n_maps == 0 ? nullptr : aligned<TensorMap>(alloca((n_maps + 1) * sizeof(TensorMap)));
  record.address(call.words.data(), parameters, maps);
  cuda::Config config = record.config_of(grid);
  record.launch(grid, config, call.launch.stream, parameters);
  return true;
}

}  // namespace detail

void set_hooks(const Hooks* given) { detail::hooks.store(given, std::memory_order_release); }
Stats stats() {
  detail::Counts& c = detail::counts();
  const std::scoped_lock lock(c.mutex);
  return {c.hits, c.misses, c.compiled, c.loaded, c.tuned, c.last_miss};
}
void record_to(const std::string& path) { detail::recorder().open(path); }
void count_hits(bool on) { detail::counting.store(on); }

void set_tuning(const Tuning* given) { detail::tuning.store(given, std::memory_order_release); }

std::string Provider::evaluate(const Question& q) {
  throw Error("a decorator's Python function must be asked and there is no Python: pack it with '" +
                  q.function + " @" + q.kind + " " + q.arguments + "'",
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
    if (leaf.kind != Kind::integer && leaf.kind != Kind::boolean)
      return refuse("which is no integer");
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

Kernel jit(const std::string& file, const std::string& function,
           std::shared_ptr<Provider> provider) {
  Functions& f = functions();
  const std::scoped_lock lock(f.mutex);
  const auto key = std::make_tuple(provider.get(), file, function);
  return Kernel(
      &f.all.try_emplace(key, std::move(provider), file, function, f.all.size()).first->second);
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
