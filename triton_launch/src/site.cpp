// triton_launch/src/site.cpp: what happens once a key: decorators are asked and configurations
// timed, the kernel is compiled and loaded, and the record is published.
#include "site.h"

#include <thread>

namespace plait::triton::detail {

std::atomic<const Hooks*> hooks{};
std::atomic<const Tuning*> tuning{};
std::atomic<bool> counting{};

Counts& counts() {
  static auto* made = new Counts{};
  return *made;
}

bool is_capturing(const cuda::Driver& driver, Stream stream) {
  int capturing = 0;
  driver.check(driver.is_capturing(of_driver(stream), &capturing), "cuStreamIsCapturing");
  return capturing != 0;
}

// A call whose key is new: what its decorators and its kernel are made from.
struct Asked {
  Asked(const Call& call, const Signature& signature, const Binding& binding)
      : call(call),
        arguments(call.leaves, reinterpret_cast<const uint8_t*>(call.words.data() + n_head_words),
                  call.words.data() + n_head_words + n_state_words(call.leaves.size()),
                  call.strings) {
    size_t p = 0;
    for (size_t k = 0, end = 0; k < arguments.size(); ++k) {
      if (k >= end) p = parameter_of(binding, k), end = arguments.next(k);
      const Kind kind = arguments.leaf(k).kind;
      const DType type = state::type_of(arguments.state(k));
      const bool is_typed =
          kind == Kind::pointer || kind == Kind::dtype || kind == Kind::descriptor;
      if (!is_typed || arguments.state(k) & state::none ||
          (type != state::unknown && type != state::not_on_gpu))
        continue;
      throw Error("argument " + std::to_string(p) + " (" + signature.parameters[p].name + "): " +
                      (type == state::unknown ? "Triton has no such dtype"
                                              : "a tensor that is not on a GPU"),
                  signature.function, "", static_cast<int>(p));
    }
    if (signature.layers.empty()) return;
    std::string types;
    for (size_t k = 0; k < arguments.size(); k = arguments.next(k)) {
      p = parameter_of(binding, k);
      Settings& group = arguments.leaf(k).name ? named : positional;
      group.emplace_back(signature.parameters[p].name, arguments.value(k, true));
      if (arguments.leaf(k).kind == Kind::pointer && !(arguments.state(k) & state::none))
        types += (types.empty() ? "" : ",") + arguments.value(k, true).substr(1);
    }
    const Settings options = options_of(signature, call.launch.options);
    named.insert(named.end(), options.begin(), options.end());
    facts = {{"@types", "(" + types + ")"}};
  }

  static size_t parameter_of(const Binding& binding, size_t leaf) {
    const std::vector<int>& all = binding.sources;
    return static_cast<size_t>(std::find(all.begin(), all.end(), static_cast<int>(leaf)) -
                               all.begin());
  }

  // All that an answer may depend on.
  Settings told(const Settings& chosen) const {
    Settings all = positional;
    for (const Settings* more : {&named, &chosen, &facts})
      all.insert(all.end(), more->begin(), more->end());
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

// What of a call's words is its key. It grows with what answers of decorators depended on; records
// of a smaller one stay right.
const std::vector<uint64_t>& Site::mask_of(std::span<const Leaf> leaves) {
  Binding wide = binding;
  if (!signature.layers.empty()) widen(wide, signature, leaves, function->deciding_names());
  std::vector<uint64_t> mask(n_head_words, ~uint64_t{0});
  mask.insert(mask.end(), wide.mask.begin(),
              wide.mask.begin() + static_cast<std::ptrdiff_t>(wide.n_compared));
  if (masks_.empty() || *masks_.back() != mask) {
    masks_.push_back(std::make_unique<std::vector<uint64_t>>(std::move(mask)));
    records_.clear();
  }
  return *masks_.back();
}

void Site::publish(Record* record, const Call& call) {
  record->mask = &mask_of(call.leaves);
  for (size_t k = 0; k < record->mask->size(); ++k)
    record->key.push_back(call.words[k] & (*record->mask)[k]);
  record->strings.assign(call.strings.begin(), call.strings.end());
  records_.push_back(record);
  Table* table = table_.load(std::memory_order_relaxed);
  if (table && &table->mask == record->mask && 2 * records_.size() <= table->places.size())
    return table->put(record);
  tables_.push_back(std::make_unique<Table>(*record->mask, record->mask->size(),
                                            std::bit_ceil(4 * records_.size())));
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
  c.last_miss =
      function->name + " " + record.specialization.text + ", " +
      (before ? "before it " + before->specialization.text : "the first call of its kind");
}

std::unique_ptr<Record> Site::prepare(const Asked& asked, const Settings& chosen,
                                      bool timed) const {
  auto record = std::make_unique<Record>(Record{function, &signature, &driver});
  record->binding = &binding;
  record->chosen = chosen;
  record->specialization = specialize(signature, binding, asked.arguments, chosen);
  record->kernel = told(function->name, record->specialization.text,
                        [&] { return load(asked, *record, timed); });
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
  for (size_t k = 0, argument = 0; k < asked.arguments.size() && !chosen.empty();
       k = asked.arguments.next(k), ++argument)
    if (const size_t p = Asked::parameter_of(binding, k);
        triton::find(chosen, signature.parameters[p].name + ".zero"))
      record->cleared.push_back({p, argument, first + asked.arguments.word(k)});
  record->plain = record->defaults.empty() && record->fixes.empty() && record->descriptors.empty();
  return record;
}

Request Site::request_of(const Asked& asked, const Specialization& specialization,
                         const Settings& chosen) const {
  int device = 0;
  std::string gpu;
  driver.check(driver.current_device(&device), "cuCtxGetDevice");
  driver.check(driver.architecture(driver, &gpu, device), "cuDeviceGetAttribute");
  if (!gpu.starts_with("sm_"))
    throw std::runtime_error("kernels are launched from C++ on NVIDIA's GPUs, this one is " + gpu);
  return {function->file, function->name, specialization.text,
          options_text(signature, options_of(signature, asked.call.launch.options, chosen)),
          std::stoi(gpu.substr(3))};
}

const cuda::Kernel* Site::load(const Asked& asked, Record& record, bool timed) const {
  const Request request = request_of(asked, record.specialization, record.chosen);
  const std::string& text = request.specialization;
  Flight& flight = function->flight(request);
  const auto lock = function->provider->hold(flight.mutex);
  std::unique_ptr<Loaded>& loaded = flight.loaded[asked.call.words[0]];
  if (!loaded && is_capturing(driver, asked.call.launch.stream))
    throw std::runtime_error(
        "it is not loaded yet and the stream is being captured: launch it once before");
  const Binary& binary = flight.compile(*function->provider, request);
  record.recipes = read_recipes(binary.descriptors);
  if (!record.recipes.empty()) driver.need(record.encode, "cuTensorMapEncodeTiled");
  record.specialization.slots =
      expand(record.specialization.slots, record.recipes, asked.arguments);
  if (!loaded) {
    loaded = std::make_unique<Loaded>(driver, binary, record.specialization.slots);
    ++counts().loaded;
  }
  const std::string written =
      function->name + " " + text + (request.options.empty() ? "" : " ") + request.options;
  if (!timed && flight.signature.empty()) recorder().note(flight.signature = written);
  if (timed && !std::exchange(flight.is_timed, true)) recorder().note("?" + written);
  return &loaded->kernel;
}

// ---- what decorators choose: what is known, what the provider answers, and of configurations the
// fastest
Settings Site::decide(Asked& asked, size_t layer, Settings chosen) const {
  for (; layer < signature.layers.size(); ++layer) {
    const Layer& l = signature.layers[layer];
    if (!l.tunes) {
      const Settings found =
          read_settings(ask(asked, "heuristics" + std::to_string(layer), chosen));
      chosen.insert(chosen.end(), found.begin(), found.end());
    } else {
      const Settings found = l.configs.size() == 1 ? l.configs[0] : tune(asked, layer, chosen);
      chosen = with_config(asked, layer, std::move(chosen), found);
    }
  }
  return chosen;
}

// And with what its pre_hook does.
Settings Site::with_config(const Asked& asked, size_t layer, Settings chosen,
                           const Settings& config) const {
  chosen.insert(chosen.end(), config.begin(), config.end());
  if (!signature.layers[layer].hooked) return chosen;
  const Settings done = read_settings(ask(asked, "hook" + std::to_string(layer), chosen));
  chosen.insert(chosen.end(), done.begin(), done.end());
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

// What is timed: each configuration, with what the decorators behind this one decide for it. Throws
// WantsLengths where the lengths of arguments are to be known.
std::vector<Settings> Site::candidates_of(Asked& asked, size_t layer, const Settings& chosen,
                                          const std::vector<Settings>& configs) const {
  const Layer& l = signature.layers[layer];
  const bool has_lengths = asked.call.nbytes.data() != nullptr;
  if (!has_lengths && !(l.reset.empty() && l.restore.empty())) throw WantsLengths();
  std::vector<Settings> candidates;
  for (const Settings& c : configs) {
    candidates.push_back(decide(asked, layer + 1, with_config(asked, layer, chosen, c)));
    const bool clears = std::any_of(candidates.back().begin(), candidates.back().end(),
                                    [](const auto& set) { return set.first.ends_with(".zero"); });
    if (clears && !has_lengths) throw WantsLengths();
  }
  return candidates;
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
  std::string key = "plait tuned 1\n" + signature.identity + "\n" + machine.gpu + "\n" +
                    machine.driver + "\n" + function->name + " " + kind + " " + condition;
  for (const Settings& c : configs) key += "\n" + write_settings(c);
  static const Tuning nowhere{Miss::tune, ""};
  const TunedFile file(signature.identity.empty() ? &nowhere : policy, key);
  std::optional<std::string> best = file.read();
  const auto refuse = [&](const std::string& why) {
    throw Error(why + "\n  key: " + condition, function->name);
  };
  if (!best && policy && policy->on_miss == Miss::error)
    refuse("no configuration is known for this key: a pack's table may have '" + function->name +
           " @" + kind + " " + condition + " -> " + write_settings(configs[0]) + "'");
  if (!best && policy && policy->on_miss == Miss::first) return configs[0];
  if (!best) {
    if (is_capturing(driver, asked.call.launch.stream))
      refuse("it is not tuned yet and the stream is being captured: launch it once before");
    if (l.times_with_hooks)
      refuse(
          "its @triton.autotune has a pre_hook or post_hook, Python functions that C++ cannot call "
          "around what it times: let Python choose, and write that down as a fact, or "
          "set_tuning()");
    const std::vector<double> ms = time(asked, l, candidates_of(asked, layer, chosen, configs));
    best = write_settings(
        configs[static_cast<size_t>(std::min_element(ms.begin(), ms.end()) - ms.begin())]);
    file.write(*best);
    ++counts().tuned;
  }
  function->learn(kind, names, told, *best);
  return read_settings(*best);
}

// What timing may not change: tensors that are reset or restored.
std::vector<Kept> Site::kept_of(const Asked& asked, const Layer& layer) const {
  const Call& call = asked.call;
  std::vector<Kept> kept;
  const auto keep = [&](const std::string& name, bool zero) {
    for (size_t k = 0, at = 0; k < call.leaves.size(); k = asked.arguments.next(k), ++at) {
      if (signature.parameters[Asked::parameter_of(binding, k)].name != name) continue;
      const uint64_t address =
          call.words[n_head_words + n_state_words(call.leaves.size()) + asked.arguments.word(k)];
      if (call.nbytes[at] == 0 && address != 0)
        throw Error("@triton.autotune resets or restores " + name +
                        ", whose length is not known: pass a dense "
                        "tensor or plait::triton::Pointer{data, dtype, nbytes}",
                    function->name);
      if (address != 0) kept.push_back({reinterpret_cast<void*>(address), call.nbytes[at], zero});
    }
  };
  for (const std::string& name : layer.reset) keep(name, true);
  for (const std::string& name : layer.restore) keep(name, false);
  return kept;
}

// By as many threads as the provider likes; who wants a kernel afterwards finds it, or why there is
// none.
void Site::compile_all(const Asked& asked, const std::vector<Settings>& candidates) const {
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
  void* context = reinterpret_cast<void*>(asked.call.words[0]);
  const size_t n_helpers = std::min<size_t>(function->provider->concurrency(), candidates.size());
  for (size_t k = 1; k < n_helpers; ++k)
    helpers.emplace_back([&] {
      driver.set_context(context);
      compile();
    });
  if (!helpers.empty()) compile();
  for (std::thread& t : helpers) t.join();
}

std::vector<double> Site::time(const Asked& asked, const Layer& layer,
                               const std::vector<Settings>& candidates) const {
  const Call& call = asked.call;
  const std::vector<Kept> kept = kept_of(asked, layer);
  compile_all(asked, candidates);
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
      c.record->clear(call.words.data(), call.nbytes, call.launch.stream);
      c.record->launch(grid, config, call.launch.stream, c.parameters.data());
    });
  }
  return told(function->name, "",
              [&] { return times(driver, call.launch.stream, kept, launches); });
}

}  // namespace plait::triton::detail
