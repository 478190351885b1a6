// triton_launch/src/function.cpp: a Python function of a provider, what of it is compiled or on its
// way, and the file in which signatures and facts are recorded.
#include <fcntl.h>
#include <unistd.h>

#include "site.h"

namespace plait::triton::detail {

const Binary& Flight::compile(Provider& provider, const Request& request) {
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

Recorder::Recorder() {
  if (const char* path = std::getenv("PLAIT_TRITON_RECORD")) open(path);
}

void Recorder::open(const std::string& path) {
  const std::scoped_lock lock(mutex_);
  if (file_ >= 0) close(file_);
  file_ = path.empty() ? -1 : ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0 && !path.empty()) throw Error("cannot write the record " + path, "(all)");
}

void Recorder::note(std::string line) {
  const std::scoped_lock lock(mutex_);
  if (file_ < 0) return;
  line += '\n';  // one write: other processes may have the same file
  if (write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    throw Error("the record cannot be written", line);
}

Recorder& recorder() {
  static auto* made = new Recorder;
  return *made;
}

const Signature& Function::signature() const {
  const auto lock = provider->hold(mutex_);
  if (signature_) return *signature_;
  Signature made(name, provider->describe(file, name));
  for (const std::string& fact : made.facts) {
    facts.read(name, fact);
    recorder().note(name + " @" + fact);
  }
  return signature_.emplace(std::move(made));
}

Flight& Function::flight(const Request& r) const {
  const auto lock = provider->hold(mutex_);
  return flights_[r.specialization + ";" + r.options + ";" + std::to_string(r.capability)];
}

void Function::list(std::vector<std::string>& signatures) const {
  for (const std::string& fact : facts.lines()) signatures.push_back(name + " @" + fact);
  const auto lock = provider->hold(mutex_);
  for (auto& [key, flight] : flights_) {
    const auto flying = provider->hold(flight.mutex);
    if (!flight.signature.empty()) signatures.push_back(flight.signature);
  }
}

void Function::learn(const std::string& kind, const std::vector<std::string>& names,
                     const Settings& told, const std::string& result) const {
  recorder().note(name + " @" + facts.add(kind, names, told, result));
}

std::vector<std::string> Function::deciding_names() const {
  std::vector<std::string> names = facts.names();
  for (const Layer& layer : signature().layers)
    if (layer.tunes) names.insert(names.end(), layer.names.begin(), layer.names.end());
  return names;
}

}  // namespace plait::triton::detail
