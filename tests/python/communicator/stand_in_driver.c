/* Stands for CUDA's driver where it is called by its library: one stream, in the calling thread, whose memory is the
   host's. A wait gives up after a while, so that a test fails and does not hang. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

static char calls[1 << 16];
static int failing = -1; /* how many more calls that enqueue succeed; below 0: all */
static int capturing = 0;
static int unready = 0;

void stand_in_reset(void) { calls[0] = 0, failing = -1, capturing = 0, unready = 0; }
void stand_in_fail_after(int number) { failing = number; }
void stand_in_capture(int is) { capturing = is; }
void stand_in_unready(int number) { unready = number; }
const char* stand_in_calls(void) { return calls; }

static int said(const char* what, long one, long other) {
  const size_t used = strlen(calls);
  if (used + 100 < sizeof calls) snprintf(calls + used, 100, "%s %ld %ld;", what, one, other);
  if (failing == 0) return 801;
  if (failing > 0) failing -= 1;
  return 0;
}

int cuCtxPushCurrent_v2(void* context) { return context == (void*)7 ? 0 : 201; }
int cuCtxPopCurrent_v2(void** context) { return *context = (void*)7, 0; }

int cuMemcpyDtoHAsync_v2(void* host, uint64_t device, size_t bytes, void* stream) {
  const int status = said("to_host", (long)bytes, (long)(intptr_t)stream);
  if (status == 0) memcpy(host, (const void*)(uintptr_t)device, bytes);
  return status;
}

int cuMemcpyHtoDAsync_v2(uint64_t device, const void* host, size_t bytes, void* stream) {
  const int status = said("to_device", (long)bytes, (long)(intptr_t)stream);
  if (status == 0) memcpy((void*)(uintptr_t)device, host, bytes);
  return status;
}

int cuStreamWriteValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  const int status = said("write", (long)value, (long)(intptr_t)stream);
  if (status == 0) __atomic_store_n((uint32_t*)(uintptr_t)address, value, __ATOMIC_RELEASE);
  return flags == 0 ? status : 1;
}

int cuStreamWaitValue32_v2(void* stream, uint64_t address, uint32_t value, unsigned flags) {
  const int status = said("wait", (long)value, (long)(intptr_t)stream);
  const struct timespec pause = {0, 100000};
  for (int i = 0; status == 0 && i < 100000; ++i) {
    if ((int32_t)(__atomic_load_n((uint32_t*)(uintptr_t)address, __ATOMIC_ACQUIRE) - value) >= 0) return 0;
    nanosleep(&pause, NULL);
  }
  return flags == 0 && status != 0 ? status : 999;
}

int cuEventRecord(void* event, void* stream) { return said("record", (long)(intptr_t)event, (long)(intptr_t)stream); }
int cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  return flags == 0 ? said("wait_for", (long)(intptr_t)event, (long)(intptr_t)stream) : 1;
}
int cuEventQuery(void* event) {
  if (capturing == 1) return 900; /* and nothing is captured any more; 2: by another thread */
  return unready > 0 ? (unready -= 1, 600) : event == NULL;
}
int cuStreamIsCapturing(void* stream, int* is) { return *is = capturing, stream == NULL; }
int cuGetErrorName(int status, const char** name) {
  return status == 801 ? (*name = "CUDA_ERROR_NOT_SUPPORTED", 0) : 1;
}
