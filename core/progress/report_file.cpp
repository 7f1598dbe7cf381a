#include "progress/report_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <system_error>

namespace telegrad {
namespace {

bool write_all(int descriptor, const std::string& text) {
  std::size_t done = 0;
  while (done < text.size()) {
    const auto written = ::write(descriptor, text.data() + done, text.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    done += static_cast<std::size_t>(written);
  }
  return true;
}

}  // namespace

std::string write_report_file(const std::string& folder, const std::string& name, const std::string& text) noexcept {
  try {
    const std::string path = folder + "/" + name;
    const std::string draft = path + "." + std::to_string(::getpid()) + ".part";
    const auto failed = [&](const char* what) {
      const std::string why = std::strerror(errno);
      ::unlink(draft.c_str());
      return "no report: " + std::string(what) + " " + draft + " failed: " + why +
             " (another folder: TELEGRAD_REPORT_DIR in Python, Options::report_folder in C++)";
    };
    std::error_code unmade;  // mkdir says what is wrong
    std::filesystem::create_directories(std::filesystem::path(folder).parent_path(), unmade);
    if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return failed("making the folder of");
    ::unlink(draft.c_str());
    const int descriptor = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0) return failed("opening");
    const bool written = write_all(descriptor, text);
    if (::close(descriptor) != 0 || !written) return failed("writing");
    if (::rename(draft.c_str(), path.c_str()) != 0) return failed("renaming");
    return "report: " + path + " (`telegrad report " + folder + "` reads those of all ranks)";
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace telegrad
