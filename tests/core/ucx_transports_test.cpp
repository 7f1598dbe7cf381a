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
