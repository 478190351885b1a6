// native/jit/providers.cpp: kernels from a pack, and from a Python process that compiles them.
//
// The process is plait/runtime/triton_kernels.py. Over a socket, which is its standard input, go frames:
// 8 bytes length, little-endian, then as many bytes. A request is lines: `describe`, file, function; or
// `compile`, file, function, capability, specialization, options (or `cubin`, for Python, with the same);
// or `evaluate`, file, function, kind, arguments. An answer's first byte is `k`, and then a signature, a
// pack with the one kernel, or what Provider::evaluate says follows; or it is `e`, or `r` if other options
// may do, and what went wrong follows: a line, and Python's traceback.
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "core/cubins.h"
#include "core/plan.h"
#include "jit/specialize.h"

extern char** environ;

namespace plait::triton {
namespace {
Binary binary_of(const Cubins& cubins, const std::string& name, const Cubins::Entry& e) {
  const cuda::KernelFacts& f = e.facts;
  const std::string* descriptors = cubins.text(name);
  return {e.image, f.symbol, f.num_warps, f.num_ctas, f.shared, f.global_scratch, f.global_alignment,
          f.profile_scratch, f.profile_alignment, f.cooperative, f.pdl, descriptors ? *descriptors : ""};
}

class Pack : public Provider {
 public:
  explicit Pack(const std::string& path) : path_(path), cubins_(Cubins::read(path)) {}

  std::string describe(const std::string&, const std::string& function) override {
    const std::string* text = cubins_.text(function);
    if (!text) throw Error("it is not in " + path_, function);
    return *text;
  }

  Binary compile(const Request& r) override {
    const std::string name =
        r.function + "|" + r.specialization + "|" + r.options + "|" + std::to_string(r.capability);
    const Cubins::Entry* found = cubins_.find(name);
    if (!found)  // among configurations that are tuned, it is one less
      throw Refused("not in " + path_ + " for sm_" + std::to_string(r.capability) + ": pack it with '" +
                        r.function + " " + r.specialization + (r.options.empty() ? "" : " ") + r.options + "'",
                    r.function, r.specialization);
    return binary_of(cubins_, name, *found);
  }

 private:
  const std::string path_;
  const Cubins cubins_;
};

class Worker : public Provider {
 public:
  explicit Worker(std::string python) : python_(std::move(python)) {}
  ~Worker() override { stop(); }

  std::string describe(const std::string& file, const std::string& function) override {
    return ask("describe\n" + file + "\n" + function, function, "");
  }

  std::string evaluate(const Question& q) override {
    return ask("evaluate\n" + q.file + "\n" + q.function + "\n" + q.kind + "\n" + q.arguments, q.function, "");
  }

  Binary compile(const Request& r) override {
    const std::string answer =
        ask("compile\n" + r.file + "\n" + r.function + "\n" + std::to_string(r.capability) + "\n" +
                r.specialization + "\n" + r.options,
            r.function, r.specialization);
    const Cubins made(answer, "(the answer of " + python_ + ")");
    return binary_of(made, "", *made.find(""));
  }

 private:
  std::string ask(const std::string& request, const std::string& kernel, const std::string& specialization) {
    const std::scoped_lock lock(mutex_);
    std::string answer;
    if (socket_ < 0) start(kernel);
    if (!send_frame(request) || !receive_frame(answer) || answer.empty()) {
      stop();
      throw Error("the process that compiles kernels ended (" + python_ +
                      " -m plait.runtime.triton_kernels; its standard error says why)",
                  kernel, specialization);
    }
    if (answer[0] == 'k') return answer.substr(1);
    const size_t line = answer.find('\n');
    const std::string what = answer.substr(1, line - 1), trace = line == answer.npos ? "" : answer.substr(line + 1);
    if (answer[0] == 'r') throw Refused(what, kernel, specialization, -1, trace);
    throw Error(what, kernel, specialization, -1, trace);
  }

  void start(const std::string& kernel) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
      throw Error(std::string("no socket for the process that compiles: ") + std::strerror(errno), kernel);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
    std::string words[] = {python_, "-m", "plait.runtime.triton_kernels"};
    char* const arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    const int error = posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    socket_ = ends[0];
    if (error == 0) return;
    pid_ = 0;
    stop();
    throw Error("cannot run " + python_ + ": " + std::strerror(error), kernel);
  }

  void stop() {
    if (socket_ >= 0) close(socket_);  // it ends when it sees this
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    socket_ = -1;
    pid_ = 0;
  }

  bool send_frame(const std::string& text) const {
    const uint64_t size = text.size();
    std::string frame(reinterpret_cast<const char*>(&size), sizeof size);
    frame += text;
    for (size_t at = 0; at < frame.size();) {
      const ssize_t n = send(socket_, frame.data() + at, frame.size() - at, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }

  bool receive(char* to, size_t size) const {
    for (size_t at = 0; at < size;) {
      const ssize_t n = recv(socket_, to + at, size - at, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }

  bool receive_frame(std::string& text) const {
    uint64_t size = 0;
    if (!receive(reinterpret_cast<char*>(&size), sizeof size)) return false;
    text.resize(size);
    return receive(text.data(), size);
  }

  const std::string python_;
  std::mutex mutex_;  // one request at a time
  int socket_ = -1;
  pid_t pid_ = 0;
};
}  // namespace

std::shared_ptr<Provider> open_pack(const std::string& path) {
  try {
    return std::make_shared<Pack>(path);
  } catch (const LoadError& error) {
    throw Error(error.what(), "(all of a pack)");
  }
}

std::shared_ptr<Provider> worker(const std::string& python) {
  static std::mutex mutex;
  static auto* all = new std::map<std::string, std::shared_ptr<Provider>>;
  const std::scoped_lock lock(mutex);
  std::shared_ptr<Provider>& made = (*all)[python];
  if (!made) made = std::make_shared<Worker>(python);
  return made;
}

}  // namespace plait::triton
