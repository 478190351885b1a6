// tests/native_trust.cpp: says of each folder that it is given why it is not used.
#include <cstdio>

#include "core/files.h"

int main(int n, char** folders) {
  for (int k = 1; k < n; ++k) {
    const int file = plait::files::open_regular(std::string(folders[k]) + "/file");
    const bool taken =
        file >= 0 && plait::files::Trust().takes(file, std::string(folders[k]) + "/file");
    std::printf("%d %s\n", taken, plait::files::Trust().against(folders[k]).c_str());
  }
}
