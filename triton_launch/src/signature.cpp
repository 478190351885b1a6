// triton_launch/src/signature.cpp: signatures and options, read and written.
#include "signature.h"

#include <map>

namespace plait::triton {

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == text.npos) return parts;
    text.remove_prefix(end + 1);
  }
}

Settings read_settings(std::string_view text) {
  Settings found;
  for (const std::string_view item : split(text, ';')) {
    const size_t at = item.find('=');
    if (at != item.npos) found.emplace_back(item.substr(0, at), item.substr(at + 1));
  }
  return found;
}

std::string write_settings(const Settings& settings) {
  std::string text;
  for (const auto& [name, value] : settings) text += (text.empty() ? "" : ";") + name + "=" + value;
  return text;
}

const std::string* find(const Settings& settings, std::string_view name) {
  for (const auto& [known, value] : settings)
    if (known == name) return &value;
  return nullptr;
}

Error::Error(const std::string& what, std::string kernel, std::string specialization, int argument,
             std::string traceback)
    : std::runtime_error("kernel " + kernel + ": " + what +
                         (specialization.empty() ? "" : "\n  specialization: " + specialization) +
                         (traceback.empty() ? "" : "\n" + traceback)),
      kernel(std::move(kernel)),
      specialization(std::move(specialization)),
      traceback(std::move(traceback)),
      argument(argument) {}

bool Layer::sets(std::string_view name) const {
  if (!tunes) return std::find(names.begin(), names.end(), name) != names.end();
  return std::any_of(configs.begin(), configs.end(),
                     [&](const Settings& c) { return find(c, name); });
}

Signature::Signature(const std::string& function, const std::string& text) : function(function) {
  const auto lines = split(text, '\n');
  const auto names = [](std::string_view list) {
    std::vector<std::string> found;
    for (const std::string_view name : split(list, ','))
      if (!name.empty()) found.emplace_back(name);
    return found;
  };
  options = read_settings(lines[0]);
  for (size_t k = 1; k < lines.size(); ++k) {
    if (lines[k].empty()) continue;
    const char first = lines[k][0];
    const std::string_view rest = lines[k].substr(1);
    const auto fields = split(lines[k], '|');
    if (first == '#') {
      identity = rest;
    } else if (first == '>') {
      facts.emplace_back(rest);
    } else if (first == '+' && !layers.empty()) {
      layers.back().configs.push_back(read_settings(rest));
    } else if (fields[0] == "@heuristics" && fields.size() == 2) {
      layers.push_back({false, false, false, false, names(fields[1])});
    } else if (fields[0] == "@autotune" && fields.size() == 5) {
      const auto has = [&](char flag) { return fields[4].find(flag) != std::string_view::npos; };
      layers.push_back({true, has('p'), has('b'), has('h'), names(fields[1]), names(fields[2]),
                        names(fields[3])});
    } else if (fields.size() == 4) {
      const auto has = [&](char flag) { return fields[2].find(flag) != std::string_view::npos; };
      parameters.push_back({std::string(fields[0]), std::string(fields[1]), std::string(fields[3]),
                            has('c'), has('k'), has('s'), has('a')});
    } else {
      throw Error("its signature cannot be read", function);
    }
  }
}

bool Signature::is_set(std::string_view parameter) const {
  return std::any_of(layers.begin(), layers.end(),
                     [&](const Layer& l) { return l.sets(parameter); });
}

// Sets of options by their text; they stay for good.
class OptionSet {
 public:
  Settings options;
};

const OptionSet* option_set(std::span<const Option> options) {
  static std::mutex mutex;
  static auto* all = new std::map<Settings, OptionSet>;
  Settings pairs;
  for (const Option& o : options) pairs.emplace_back(o.name, o.value);
  std::sort(pairs.begin(), pairs.end());
  const std::scoped_lock lock(mutex);
  return &all->try_emplace(pairs, OptionSet{pairs}).first->second;
}

Settings options_of(const Signature& signature, const Options& o, const Settings& chosen) {
  std::map<std::string, std::string> set;
  const auto number = [&](const char* name, int16_t value) {
    if (value >= 0) set[name] = std::to_string(value);
  };
  number("num_warps", o.num_warps);
  number("num_stages", o.num_stages);
  number("num_ctas", o.num_ctas);
  number("maxnreg", o.maxnreg);
  if (o.cooperative) set["launch_cooperative_grid"] = "True";
  if (o.pdl) set["launch_pdl"] = "True";
  if (o.others)
    for (const auto& [name, value] : o.others->options)
      if (!set.try_emplace(name, value).second)
        throw Error("two values for option " + name, signature.function);
  const auto& parameters = signature.parameters;
  for (const auto& [name, value] : chosen) {
    if (std::any_of(parameters.begin(), parameters.end(),
                    [&](const Parameter& p) { return p.name == name; }))
      continue;
    if (name.find('.') != name.npos) continue;  // a parameter's block shape
    if (!set.try_emplace(name, value).second)
      throw Error("option " + name + " is set by a decorator", signature.function);
  }
  return {set.begin(), set.end()};
}

std::string options_text(const Signature& signature, Settings options) {
  std::erase_if(options, [&](const auto& option) {
    const std::string* fallback = find(signature.options, option.first);
    return fallback && *fallback == option.second;
  });
  return write_settings(options);
}

}  // namespace plait::triton
