#include "drivers/ucx/transports.hpp"

#include "testing.hpp"

using namespace telegrad;

TEST("lists of transports that let processes of a host talk through memory") {
  for (const char* list : {"all", "shm", "sm,tcp", "tcp,self,posix", "\\sysv,tcp", "^tcp", "^tcp,cma", "^posix", "rc,xpmem"}) {
    EXPECT(allows_shared_memory(list));
  }
}

TEST("lists of transports that do not") {
  for (const char* list : {"tcp,self", "tcp", "", "^shm", "^tcp,sm", "rc_x,ud", "^all", "self", "cma,tcp"}) {
    EXPECT(!allows_shared_memory(list));
  }
}

TEST("lists of transports without memory") {
  EXPECT_EQ(without_shared_memory("all"), "^sm");
  EXPECT_EQ(without_shared_memory("shm,tcp,self"), "tcp,self");
  EXPECT_EQ(without_shared_memory("tcp,\\posix,self"), "tcp,self");
  EXPECT_EQ(without_shared_memory("^rc"), "^rc,sm");
  EXPECT_EQ(without_shared_memory("rc_x,sysv,cma"), "rc_x,cma");
  for (const char* list : {"all", "shm,tcp", "^rc", "^tcp"}) {
    EXPECT(!allows_shared_memory(without_shared_memory(list)));
  }
}

TEST("nothing is left of lists that reach other processes through memory only") {
  for (const char* list : {"shm,self", "posix,cma", "self", "", "sm,\\self,knem"}) EXPECT_EQ(without_shared_memory(list), "");
}
