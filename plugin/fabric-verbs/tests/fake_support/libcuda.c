// A libcuda with two GPUs that export nothing, as a shared library: for the loader.
#include <stddef.h>

int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &cuInit; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxPushCurrent_v2(void *context) { return 0; }
int cuCtxPopCurrent_v2(void **context) { *context = NULL; return 0; }
int cuPointerGetAttribute(void *value, int attribute, unsigned long long addr) { return 1; }
int cuPointerSetAttribute(const void *value, int attribute, unsigned long long addr) { return 1; }
int cuGetErrorString(int error, const char **text) { *text = "whatever"; return 0; }
