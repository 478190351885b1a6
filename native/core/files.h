// native/core/files.h: files that are opened once, and whose folders others cannot change.
//
// plait/runtime/trust.py says what the rules are; it has them for what Python loads.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace plait::files {

// A descriptor of the regular file at a path, or -1. Waits for nobody, as the open of a pipe would.
inline int open_regular(const std::string& path, int flags = O_RDONLY) {
  const int file = open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644);
  struct stat facts;
  if (file >= 0 && (fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode))) {
    close(file);
    errno = EINVAL;
    return -1;
  }
  return file;
}

// All of an open file.
inline std::optional<std::string> contents(int file) {
  std::string all;
  char piece[1 << 14];
  for (;;) {
    const ssize_t n = pread(file, piece, sizeof piece, static_cast<off_t>(all.size()));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return std::nullopt;
    if (n == 0) return all;
    all.append(piece, static_cast<size_t>(n));
  }
}

// All of the regular file at a path.
inline std::optional<std::string> read_regular(const std::string& path) {
  const int file = open_regular(path);
  if (file < 0) return std::nullopt;
  std::optional<std::string> all = contents(file);
  close(file);
  return all;
}

// Whose files are taken, beside root's and this user's: PLAIT_TRUST, user ids and folders.
class Trust {
 public:
  Trust() {
    const char* given = std::getenv("PLAIT_TRUST");
    std::string word;
    for (const char* at = given ? given : "";; ++at) {
      if (*at && *at != ':') {
        word += *at;
        continue;
      }
      if (!word.empty() && word.find_first_not_of("0123456789") == word.npos)
        owners_.push_back(static_cast<uid_t>(std::strtoul(word.c_str(), nullptr, 10)));
      else if (!word.empty())
        folders_.push_back(full(word));
      word.clear();
      if (!*at) return;
    }
  }

  // Why a folder is not used, or "".
  std::string against(const std::string& folder) const {
    std::filesystem::path todo = full(folder), at = "/";
    if (given(todo)) return "";
    int n_links = 0;
    for (auto part = todo.begin(); part != todo.end();) {
      const std::filesystem::path here = at / *part++;
      const bool last = part == todo.end();
      struct stat facts;
      if (lstat(here.c_str(), &facts) != 0) return "there is no " + here.string();
      if (S_ISLNK(facts.st_mode)) {
        std::error_code failed;
        std::filesystem::path rest = std::filesystem::read_symlink(here, failed);
        if (++n_links > 40 || failed) return here.string() + " is a link to itself";
        if (!owns(facts.st_uid)) return "link " + here.string() + " belongs to another user";
        for (; part != todo.end(); ++part) rest /= *part;
        todo = (at / rest).lexically_normal(), at = "/", part = todo.begin();
        continue;
      }
      const std::string why = given(here) ? "" : against(here, facts, last);
      if (!why.empty()) return why;
      at = here;
    }
    return "";
  }

  // Whether an open file may be used that lies in a folder that may be.
  bool takes(int file, const std::string& path) const {
    struct stat facts;
    return given(full(path)) ||
           (fstat(file, &facts) == 0 && owns(facts.st_uid) && !(facts.st_mode & kOthers));
  }

 private:
  static constexpr mode_t kOthers = S_IWGRP | S_IWOTH;

  static std::filesystem::path full(const std::string& path) {
    const char* home = std::getenv("HOME");
    const std::string whole = path.starts_with("~/") && home ? home + path.substr(1) : path;
    std::error_code failed;
    std::filesystem::path made = std::filesystem::absolute(whole, failed).lexically_normal();
    return made.has_filename() ? made : made.parent_path();
  }
  bool given(const std::filesystem::path& path) const {
    for (const std::filesystem::path& folder : folders_) {
      const auto rest = path.lexically_relative(folder);
      if (!rest.empty() && *rest.begin() != "..") return true;
    }
    return false;
  }
  bool owns(uid_t uid) const {
    for (const uid_t owner : owners_)
      if (uid == owner) return true;
    return uid == 0 || uid == geteuid();
  }
  std::string against(const std::filesystem::path& folder, const struct stat& facts,
                      bool last) const {
    if (!S_ISDIR(facts.st_mode)) return folder.string() + " is no folder";
    if (!owns(facts.st_uid))
      return folder.string() + " belongs to user " + std::to_string(facts.st_uid);
    if ((facts.st_mode & kOthers) && (last || !(facts.st_mode & S_ISVTX)))
      return "others can write to " + folder.string();
    return "";
  }

  std::vector<uid_t> owners_;
  std::vector<std::filesystem::path> folders_;
};

}  // namespace plait::files
