/* As much of CUDA's driver as Triton's launcher links and calls; a launch writes down its grid and its arguments. */
#include <stdint.h>
#include <string.h>

int num_values = 0;
uint64_t values[256];
unsigned grid[3];

int cuLaunchKernelEx(const unsigned *config, void *function, void **arguments, void **extra) {
  memcpy(grid, config, sizeof grid);
  for (int i = 0; i < num_values; i++) memcpy(&values[i], arguments[i], 8);
  return 0;
}

int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetLimit(size_t *value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 227 << 10; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute ? 0 : 1024; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "no error of a device"; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)2; return 0; }
int cuModuleLoadData(void **module, const void *image) { *module = (void *)3; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuOccupancyMaxActiveClusters(int *count, void *function, void *config) { *count = 1; return 0; }
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) { *(uint64_t *)value = pointer; return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuTensorMapEncodeIm2col(void *map) { return 0; }
int cuTensorMapEncodeTiled(void *map) { memset(map, 0, 128); return 0; }
