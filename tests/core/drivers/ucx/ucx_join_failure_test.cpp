#include "drivers/ucx/join_failure.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <string>
#include <vector>

#include "testing.hpp"

using namespace telegrad;

namespace {

bool has(const std::string& text, const char* part) { return text.find(part) != text.npos; }

void clear_environment() {
  for (const char* name : {"UCX_TLS", "UCX_NET_DEVICES", "UCX_POSIX_DIR", "UCX_LOG_LEVEL"}) ::unsetenv(name);
}

}  // namespace

TEST("each of UCX's texts has a remedy, and what is not UCX's has none") {
  clear_environment();
  for (const char* text : {"Destination is unreachable", "Shared memory error", "No such device", "Input/output error"}) {
    const std::string reason = std::string("connecting failed: ") + text;
    EXPECT(!join_remedy(reason).empty());
    const std::string told = explained(reason, {});
    EXPECT(told.starts_with(reason + " (no UCX_ variable is set; interfaces tried: "));
    EXPECT(told.ends_with("file descriptors are open): " + join_remedy(reason)));
    EXPECT_EQ(join_remedy(told), join_remedy(reason));
    EXPECT_EQ(explained(told, {}), told);  // once is enough
  }
  EXPECT_EQ(join_remedy("its process has ended"), "");
  EXPECT_EQ(explained("its process has ended", {}), "its process has ended");
}

TEST("variables and interfaces are named") {
  clear_environment();
  ::setenv("UCX_TLS", "tcp", 1);
  ::setenv("UCX_LOG_LEVEL", std::string(500, 'x').c_str(), 1);
  const std::string told = explained("No such device", {.interface = "eth99,lo"});
  EXPECT(has(told, "UCX_TLS=tcp"));
  EXPECT(has(told, "xxx…"));
  EXPECT(!has(told, std::string(200, 'x').c_str()));
  EXPECT(has(told, "interfaces tried: eth99 (no network interface of this host), lo 127.0.0.1"));
  clear_environment();
  EXPECT(has(explained("No such device", {.devices = "lo"}), "interfaces tried: lo 127.0.0.1"));
  ::setenv("UCX_NET_DEVICES", "eth98", 1);
  EXPECT(has(explained("No such device", {.devices = "lo"}), "interfaces tried: eth98 (no network interface of this host); not tried: "));
  EXPECT(has(explained("No such device", {.devices = kMemoryDevice}), "; no network is used, since all ranks share memory; "));
  EXPECT(has(explained("No such device", {.interface = "lo"}), "interfaces tried: lo 127.0.0.1"));
  clear_environment();
}

TEST("where descriptors run out, they are the cause") {
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const rlimit few{20, before.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &few);
  const std::string told = explained("connecting failed: Input/output error", {});
  std::vector<int> all;
  for (int one = 0; (one = ::open("/dev/null", O_RDONLY)) >= 0;) all.push_back(one);
  const std::string none_left = explained("connecting failed: Input/output error", {});
  for (const int one : all) ::close(one);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT(has(told, " of 20 file descriptors are open): raise the limit of open files"));
  EXPECT(has(none_left, "20 of 20 file descriptors are open): raise the limit of open files"));
  EXPECT(!has(explained("Input/output error", {}), "raise the limit"));
}

TEST("why there is no shared memory") {
  clear_environment();
  char folder[] = "/tmp/telegrad-test-XXXXXX";
  REQUIRE(::mkdtemp(folder) != nullptr);
  ::setenv("UCX_POSIX_DIR", folder, 1);
  EXPECT_EQ(why_no_memory_file(), "");
  EXPECT(::rmdir(folder) == 0);  // and nothing is left in it
  EXPECT_EQ(why_no_memory_file(), std::string(folder) + ": No such file or directory");
  clear_environment();
  const std::array<Rank, 2> ranks{2, 3};
  const std::string text = lost_memory_text("node7", ranks, "/dev/shm: Read-only file system");
  EXPECT(text.starts_with("no shared memory on host node7 for rank 2, 3 (/dev/shm: Read-only file system): messages "));
  EXPECT(has(text, "go by TCP"));
  EXPECT(has(text, "mount -o remount,rw,size=1g /dev/shm"));
}
