// triton_launch/src/tune.cpp: facts that decorators made, files of results, and a stopwatch for
// kernels.
#include "tune.h"

#include "core/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <set>

namespace plait::triton {
namespace {
std::atomic<const Scratch*> scratch_memory{};

constexpr std::string_view kArrow = " -> ";
constexpr unsigned kLocks = 64;   // files of a folder that processes lock
constexpr int kFirstRuns = 3;     // of every kernel
constexpr double kSlow = 1.5;     // slower by this much after that: no more runs
constexpr double kBudgetMs = 20;  // of the rest, a kernel
constexpr int kMinRuns = 8, kMaxRuns = 60;
constexpr int kL2Bytes = 38;  // a device attribute
constexpr size_t kMinFlush = 16 << 20;

// What of the driver only tuning needs.
struct Clock {
  explicit Clock(const cuda::Driver& driver) {
    driver.need(wait, "cuEventSynchronize");
    driver.need(elapsed, "cuEventElapsedTime");
    driver.need(destroy, "cuEventDestroy_v2");
    driver.need(fill, "cuMemsetD8Async");
    driver.need(name, "cuDeviceGetName");
    driver.need(version, "cuDriverGetVersion");
  }
  int (*wait)(cuda::Event);
  int (*elapsed)(float*, cuda::Event, cuda::Event);
  int (*destroy)(cuda::Event);
  int (*fill)(void*, unsigned char, size_t, cuda::Stream);
  int (*name)(char*, int, int);
  int (*version)(int*);
};
const Clock& clock_of(const cuda::Driver& driver) {
  static const Clock clock(driver);
  return clock;
}

struct Event {
  explicit Event(const cuda::Driver& driver) : driver(driver) {
    driver.check(driver.make_event(&handle, 0), "cuEventCreate");
  }
  ~Event() { clock_of(driver).destroy(handle); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  const cuda::Driver& driver;
  cuda::Event handle = nullptr;
};

int attribute(const cuda::Driver& driver, int which) {
  int device = 0, value = 0;
  driver.check(driver.current_device(&device), "cuCtxGetDevice");
  driver.check(driver.device_attribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

std::vector<std::string> values_of(const std::vector<std::string>& names, const Settings& told) {
  std::vector<std::string> values;
  for (const std::string& name : names) {
    const std::string* value = find(told, name);
    values.push_back(value ? *value : "-");
  }
  return values;
}

std::string line_of(const std::string& kind, const std::string& told, const std::string& result) {
  return kind + (told.empty() ? "" : " ") + told + std::string(kArrow) + result;
}

std::string hash_of(const std::string& text) {
  uint64_t a = 0xcbf29ce484222325, b = 0x9e3779b97f4a7c15;
  for (const unsigned char c : text) {
    a = (a ^ c) * 0x100000001b3;
    b = std::rotl(b + c, 23) * 0xff51afd7ed558ccd;
  }
  char out[33];
  std::snprintf(out, sizeof out, "%016lx%016lx", a, b);
  return out;
}

std::string folder_of(const Tuning* tuning) {
  if (tuning && tuning->folder) return tuning->folder;
  if (const char* cache = std::getenv("PLAIT_CACHE_DIR")) return std::string(cache) + "/tuned";
  const char* home = std::getenv("HOME");
  return home ? std::string(home) + "/.cache/plait/tuned" : "";
}
}  // namespace

void set_scratch(const Scratch* given) { scratch_memory.store(given, std::memory_order_release); }

std::string conditions(const std::vector<std::string>& names, const Settings& told) {
  const std::vector<std::string> values = values_of(names, told);
  Settings all;
  for (size_t k = 0; k < names.size(); ++k) all.emplace_back(names[k], values[k]);
  return write_settings(all);
}

void Facts::read(const std::string& function, std::string_view line) {
  const size_t space = line.find(' '), arrow = line.find(kArrow);
  if (arrow == line.npos || space > arrow)
    throw Error("a fact cannot be read: " + std::string(line), function);
  std::vector<std::string> names;
  const std::string_view told =
      space == arrow ? std::string_view() : line.substr(space + 1, arrow - space - 1);
  const Settings settings = read_settings(told);
  for (const auto& [name, value] : settings) names.push_back(name);
  add(std::string(line.substr(0, space)), names, settings,
      std::string(line.substr(arrow + kArrow.size())));
}

std::optional<std::string> Facts::find(const std::string& kind, const Settings& told) const {
  const std::scoped_lock lock(mutex_);
  const auto known = all_.find(kind);
  if (known == all_.end()) return std::nullopt;
  for (const auto& [names, results] : known->second) {
    const auto found = results.find(values_of(names, told));
    if (found != results.end()) return found->second;
  }
  return std::nullopt;
}

std::string Facts::add(const std::string& kind, const std::vector<std::string>& names,
                       const Settings& told, const std::string& result) {
  const std::scoped_lock lock(mutex_);
  all_[kind][names][values_of(names, told)] = result;
  return line_of(kind, conditions(names, told), result);
}

std::vector<std::string> Facts::names() const {
  const std::scoped_lock lock(mutex_);
  std::set<std::string> found;
  for (const auto& [kind, by_names] : all_)
    for (const auto& [names, results] : by_names) found.insert(names.begin(), names.end());
  return {found.begin(), found.end()};
}

std::vector<std::string> Facts::lines() const {
  const std::scoped_lock lock(mutex_);
  std::vector<std::string> found;
  for (const auto& [kind, by_names] : all_)
    for (const auto& [names, results] : by_names)
      for (const auto& [values, result] : results) {
        Settings told;
        for (size_t k = 0; k < names.size(); ++k) told.emplace_back(names[k], values[k]);
        found.push_back(line_of(kind, write_settings(told), result));
      }
  return found;
}

TunedFile::TunedFile(const Tuning* tuning, const std::string& key) : key_(key) {
  const std::string folder = folder_of(tuning), hash = hash_of(key);
  if (folder.empty()) return;
  std::error_code failed;
  for (std::filesystem::path at; const auto& part : std::filesystem::absolute(folder, failed)) {
    at /= part;
    if (!part.empty()) mkdir(at.c_str(), 0755);  // less the umask; the folder may be there
  }
  if (const std::string why = files::Trust().against(folder); !why.empty()) {
    static std::once_flag once;
    std::call_once(once, [&] {
      std::fprintf(stderr, "plait does not use what is in %s (%s): this process tunes anew\n",
                   folder.c_str(), why.c_str());
    });
    return;
  }
  const std::string name =
      folder + "/lock-" + std::to_string(std::stoul(hash.substr(0, 4), nullptr, 16) % kLocks);
  lock_ = files::open_regular(name, O_RDWR | O_CREAT | O_NOFOLLOW);
  while (lock_ >= 0 && flock(lock_, LOCK_EX) != 0 && errno == EINTR) {}
  path_ = folder + "/" + hash;
}

TunedFile::~TunedFile() {
  if (lock_ >= 0) close(lock_);
}

std::optional<std::string> TunedFile::read() const {
  const int file = path_.empty() ? -1 : files::open_regular(path_, O_RDONLY | O_NOFOLLOW);
  if (file < 0) return std::nullopt;
  const std::string all =
      files::Trust().takes(file, path_) ? files::contents(file).value_or("") : "";
  close(file);
  if (!all.starts_with(key_ + "\n") || !all.ends_with("\n")) return std::nullopt;
  return all.substr(key_.size() + 1, all.size() - key_.size() - 2);
}

void TunedFile::write(const std::string& result) const {
  if (path_.empty()) return;
  const std::string part = path_ + "." + std::to_string(getpid());  // nobody sees half a file
  unlink(part.c_str());
  const int file = files::open_regular(part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
  const std::string all = key_ + "\n" + result + "\n";
  std::error_code failed;
  if (file >= 0 && ::write(file, all.data(), all.size()) == static_cast<ssize_t>(all.size()))
    std::filesystem::rename(part, path_, failed);
  else
    unlink(part.c_str());
  if (file >= 0) close(file);
}

Memory::Memory(const cuda::Driver& driver, size_t nbytes, size_t alignment, Stream stream)
    : driver_(driver), stream_(stream), user_(scratch_memory.load(std::memory_order_acquire)) {
  if (nbytes == 0) return;
  if (user_) {
    data = user_->allocate(user_->user, nbytes, alignment, stream);
  } else if (driver.allocate && driver.free) {
    driver.check(driver.allocate(&data, nbytes, of_driver(stream)), "cuMemAllocAsync");
  }
  if (!data)
    throw std::runtime_error("no " + std::to_string(nbytes) +
                             " bytes of scratch memory; set_scratch() gives it some");
}

Memory::Memory(Memory&& other) noexcept
    : data(std::exchange(other.data, nullptr)),
      driver_(other.driver_),
      stream_(other.stream_),
      user_(other.user_) {}

Memory::~Memory() {
  if (data && user_ && user_->free) user_->free(user_->user, data, stream_);
  if (data && !user_) driver_.free(data, of_driver(stream_));
}

void clear(const cuda::Driver& driver, void* data, size_t nbytes, Stream stream) {
  driver.check(clock_of(driver).fill(data, 0, nbytes, of_driver(stream)), "cuMemsetD8Async");
}

std::vector<double> times(const cuda::Driver& driver, Stream stream, const std::vector<Kept>& kept,
                          std::span<const std::function<void()>> launches) {
  static std::mutex one_at_a_time;
  const std::scoped_lock lock(one_at_a_time);
  const Clock& clock = clock_of(driver);
  const cuda::Stream s = of_driver(stream);
  const size_t n_flush =
      std::max(2 * static_cast<size_t>(std::max(attribute(driver, kL2Bytes), 0)), kMinFlush);
  const Memory flush(driver, n_flush, 16, stream);
  std::vector<Memory> copies;
  for (const Kept& k : kept) {
    copies.emplace_back(driver, k.zero ? 0 : k.nbytes, 16, stream);
    if (!k.zero)
      driver.check(driver.copy(copies.back().data, k.data, k.nbytes, s), "cuMemcpyDtoDAsync");
  }
  const auto restore = [&] {
    for (size_t k = 0; k < kept.size(); ++k)
      driver.check(kept[k].zero ? clock.fill(kept[k].data, 0, kept[k].nbytes, s)
                                : driver.copy(kept[k].data, copies[k].data, kept[k].nbytes, s),
                   "restoring a tensor");
  };

  const Event start(driver), end(driver);
  const auto run = [&](const std::function<void()>& launch) {
    restore();
    driver.check(clock.fill(flush.data, 0, n_flush, s), "cuMemsetD8Async");
    driver.check(driver.record_event(start.handle, s), "cuEventRecord");
    launch();
    driver.check(driver.record_event(end.handle, s), "cuEventRecord");
    driver.check(clock.wait(end.handle), "cuEventSynchronize");
    float ms = 0;
    driver.check(clock.elapsed(&ms, start.handle, end.handle), "cuEventElapsedTime");
    return static_cast<double>(ms);
  };

  constexpr double never = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> samples(launches.size());
  const auto median = [&](size_t k) {
    std::vector<double>& all = samples[k];
    if (all.empty()) return never;
    std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2),
                     all.end());
    return all[all.size() / 2];
  };
  std::exception_ptr refused;
  double best = never;
  for (size_t k = 0; k < launches.size(); ++k) try {
      run(launches[k]);  // the first one warms up
      for (int n = 0; n < kFirstRuns; ++n) samples[k].push_back(run(launches[k]));
      best = std::min(best, median(k));
    } catch (const Refused&) {
      refused = std::current_exception();
    }
  if (best == never) std::rethrow_exception(refused);
  std::vector<double> found(launches.size(), never);
  std::vector<size_t> fast;
  for (size_t k = 0; k < launches.size(); ++k) {
    found[k] = median(k);
    if (found[k] <= kSlow * best) fast.push_back(k);
  }
  const int rounds =
      static_cast<int>(std::clamp<double>(kBudgetMs / std::max(best, 1e-3), kMinRuns, kMaxRuns));
  for (int n = 0; n < rounds && fast.size() > 1; ++n)  // in turns: the device's clock changes
    for (const size_t k : fast) samples[k].push_back(run(launches[k]));
  for (const size_t k : fast) found[k] = median(k);
  restore();
  return found;
}

Machine machine_of(const cuda::Driver& driver) {
  const Clock& clock = clock_of(driver);
  int device = 0, version = 0;
  char name[256] = {};
  driver.check(driver.current_device(&device), "cuCtxGetDevice");
  driver.check(clock.name(name, sizeof name, device), "cuDeviceGetName");
  driver.check(clock.version(&version), "cuDriverGetVersion");
  return {name, std::to_string(version)};
}

}  // namespace plait::triton
