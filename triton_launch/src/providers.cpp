// triton_launch/src/providers.cpp: kernels from a pack, and from a Python process that compiles
// them.
//
// The process is triton_launch/worker.py. Over a socket, which is its standard input, go
// frames: 8 bytes length, little-endian, then as many bytes. A request is lines: `describe`, file,
// function; or `compile`, file, function, capability, specialization, options (or `cubin`, for
// Python, with the same); or `evaluate`, file, function, kind, arguments. An answer's first byte is
// `k`, and then a signature, a pack with the one kernel, or what Provider::evaluate says follows;
// or it is `e`, or `r` if other options may do, and what went wrong follows: a line, and Python's
// traceback. The frame `fork`, which has no answer, is followed by a byte with a socket: a new
// process answers on that, which has loaded what the first one has. The first one describes and
// evaluates, those compile, as many at once as there are cores.
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/cubins.h"
#include "core/plan.h"
#include "requests.h"

extern char** environ;

namespace plait::triton {
namespace {
Binary binary_of(const Cubins& cubins, const std::string& name, const Cubins::Entry& e) {
  const cuda::KernelFacts& f = e.facts;
  const std::string* descriptors = cubins.text(name);
  return {e.image,
          f.symbol,
          f.num_warps,
          f.num_ctas,
          f.shared,
          f.global_scratch,
          f.global_alignment,
          f.profile_scratch,
          f.profile_alignment,
          f.cooperative,
          f.pdl,
          descriptors ? *descriptors : ""};
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
      throw Refused("not in " + path_ + " for sm_" + std::to_string(r.capability) +
                        ": pack it with '" + r.function + " " + r.specialization +
                        (r.options.empty() ? "" : " ") + r.options + "' and --arch " +
                        std::to_string(r.capability),
                    r.function, r.specialization);
    return binary_of(cubins_, name, *found);
  }

 private:
  const std::string path_;
  const Cubins cubins_;
};

// One end of a conversation with a process.
class Line {
 public:
  explicit Line(int socket) : socket_(socket) {}
  Line(Line&& other) noexcept : socket_(std::exchange(other.socket_, -1)) {}
  Line& operator=(Line&& other) noexcept {
    std::swap(socket_, other.socket_);
    return *this;
  }
  ~Line() {
    if (socket_ >= 0) close(socket_);  // it ends when it sees this
  }

  bool send(const std::string& text) const {
    const uint64_t size = text.size();
    std::string frame(reinterpret_cast<const char*>(&size), sizeof size);
    frame += text;
    for (size_t at = 0; at < frame.size();) {
      const ssize_t n = ::send(socket_, frame.data() + at, frame.size() - at, MSG_NOSIGNAL);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }

  bool receive(std::string& text) const {
    uint64_t size = 0;
    if (!receive(reinterpret_cast<char*>(&size), sizeof size)) return false;
    text.resize(size);
    return receive(text.data(), size);
  }

  bool send_socket(int handle) const {
    char byte = 0;
    iovec data{&byte, 1};
    alignas(cmsghdr) char room[CMSG_SPACE(sizeof handle)] = {};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = room;
    message.msg_controllen = sizeof room;
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    *head = {CMSG_LEN(sizeof handle), SOL_SOCKET, SCM_RIGHTS};
    std::memcpy(CMSG_DATA(head), &handle, sizeof handle);
    return sendmsg(socket_, &message, MSG_NOSIGNAL) == 1;
  }

 private:
  bool receive(char* to, size_t size) const {
    for (size_t at = 0; at < size;) {
      const ssize_t n = recv(socket_, to + at, size - at, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      at += static_cast<size_t>(n);
    }
    return true;
  }

  int socket_;
};

class Worker : public Provider {
 public:
  explicit Worker(std::string python) : python_(std::move(python)) {}
  ~Worker() override { stop(); }

  std::string describe(const std::string& file, const std::string& function) override {
    return ask_first(to_describe(file, function), function);
  }
  std::string evaluate(const Question& q) override { return ask_first(to_evaluate(q), q.function); }

  unsigned concurrency() const override {
    return std::clamp(std::thread::hardware_concurrency(), 2u, kMostProcesses);
  }

  Binary compile(const Request& r) override {
    Line line = take(r.function);
    try {
      const std::string answer = ask(line, to_compile(r), r.function, r.specialization);
      give_back(std::move(line));
      return compiled(answer);
    } catch (const Ended&) {
      give_back(std::nullopt);
      throw;
    } catch (const Error&) {
      give_back(std::move(line));
      throw;
    }
  }

 private:
  struct Ended : Error {
    using Error::Error;
  };
  static constexpr unsigned kMostProcesses = 16;

  std::string ask(const Line& line, const std::string& request, const std::string& kernel,
                  const std::string& specialization) const {
    std::string answer;
    if (!line.send(request) || !line.receive(answer) || answer.empty())
      throw Ended("the process that compiles kernels ended (" + python_ +
                      " -m triton_launch.worker; its standard error says why)",
                  kernel, specialization);
    return said(answer, kernel, specialization);
  }

  // A process that is forked has the other ends of its parent's conversations: it begins its own.
  void begin() {
    const pid_t me = getpid();
    if (owner_.load() == me) return;
    const std::scoped_lock lock(mutex_, idle_mutex_);
    if (owner_.load() == me) return;
    first_.reset();
    pid_ = 0;
    idle_.clear();
    n_processes_ = 0;
    owner_.store(me);
  }

  std::string ask_first(const std::string& request, const std::string& kernel) {
    begin();
    const std::scoped_lock lock(mutex_);
    try {
      return ask(first(kernel), request, kernel, "");
    } catch (const Ended&) {
      stop();
      throw;
    }
  }

  // A process that is not busy, at most `concurrency()` of them.
  Line take(const std::string& kernel) {
    begin();
    std::unique_lock lock(idle_mutex_);
    one_is_idle_.wait(lock, [&] { return !idle_.empty() || n_processes_ < concurrency(); });
    if (!idle_.empty()) {
      Line line = std::move(idle_.back());
      idle_.pop_back();
      return line;
    }
    ++n_processes_;
    lock.unlock();
    try {
      auto [mine, theirs] = sockets(kernel);
      const std::scoped_lock asking(mutex_);
      first(kernel);
      const bool sent = first_->send("fork") && first_->send_socket(theirs);
      close(theirs);
      if (!sent) stop();  // whoever asks the new process finds that it ended
      return Line(mine);
    } catch (...) {
      give_back(std::nullopt);
      throw;
    }
  }

  void give_back(std::optional<Line> line) {
    const std::scoped_lock lock(idle_mutex_);
    if (line)
      idle_.push_back(std::move(*line));
    else
      --n_processes_;
    one_is_idle_.notify_one();
  }

  static std::pair<int, int> sockets(const std::string& kernel) {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
      throw Error(std::string("no socket for the process that compiles: ") + std::strerror(errno),
                  kernel);
    return {ends[0], ends[1]};
  }

  const Line& first(const std::string& kernel) {
    if (first_) return *first_;
    const auto [mine, theirs] = sockets(kernel);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs, 0);
    std::string words[] = {python_, "-m", "triton_launch.worker"};
    char* const arguments[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    const int error = posix_spawnp(&pid_, arguments[0], &actions, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(theirs);
    first_.emplace(mine);
    if (error == 0) return *first_;
    pid_ = 0;
    stop();
    throw Error("cannot run " + python_ + ": " + std::strerror(error), kernel);
  }

  void stop() {
    first_.reset();
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

  const std::string python_;
  std::atomic<pid_t> owner_{getpid()};
  std::mutex mutex_;  // of the first process
  std::optional<Line> first_;
  pid_t pid_ = 0;
  std::mutex idle_mutex_;
  std::condition_variable one_is_idle_;
  std::vector<Line> idle_;
  unsigned n_processes_ = 0;
};
}  // namespace

std::string said(const std::string& answer, const std::string& kernel,
                 const std::string& specialization) {
  if (answer[0] == 'k') return answer.substr(1);
  const size_t line = answer.find('\n');
  const std::string what = answer.substr(1, line - 1),
                    trace = line == answer.npos ? "" : answer.substr(line + 1);
  if (answer[0] == 'r') throw Refused(what, kernel, specialization, -1, trace);
  throw Error(what, kernel, specialization, -1, trace);
}

std::string to_describe(const std::string& file, const std::string& function) {
  return "describe\n" + file + "\n" + function;
}
std::string to_evaluate(const Question& q) {
  return "evaluate\n" + q.file + "\n" + q.function + "\n" + q.kind + "\n" + q.arguments;
}
std::string to_compile(const Request& r) {
  return "compile\n" + r.file + "\n" + r.function + "\n" + std::to_string(r.capability) + "\n" +
         r.specialization + "\n" + r.options;
}
Binary compiled(const std::string& pack) {
  const Cubins made(pack, "(what Python compiled)");
  return binary_of(made, "", *made.find(""));
}

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
