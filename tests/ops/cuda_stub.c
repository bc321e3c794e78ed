/* As much of CUDA's driver as Triton's launcher links and calls; a launch writes down its grid and its arguments.

   Tensor maps are held against what CUDA's documentation asks of them. What it only writes strides by, that each is at
   least the one before times its dimension, is asked for where `growing` is set. */
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

int growing = 0;  /* whether maps whose strides do not grow are refused */
int num_maps = 0; /* that were made */
static const unsigned sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4};

static int is_wrong(unsigned type, unsigned rank, const uint64_t *dims, const uint64_t *strides, const uint32_t *box,
                    const uint32_t *steps, int swizzle) {
  uint64_t row = (uint64_t)box[0] * sizes[type];
  if (row % 16 || (swizzle && row > 16u << swizzle)) return 1;
  for (unsigned i = 0; i < rank; i++) {
    if (dims[i] == 0 || dims[i] > 1ull << 32 || box[i] == 0 || box[i] > 256) return 1;
    if (i && (steps[i] == 0 || steps[i] > 8)) return 1;
    if (i + 1 < rank && (strides[i] % 16 || strides[i] >= 1ull << 40)) return 1;
  }
  uint64_t least = dims[0] * sizes[type];
  for (unsigned i = 0; growing && i + 1 < rank; least = strides[i] * dims[i + 1], i++)
    if (strides[i] < least) return 1;
  return 0;
}

int cuTensorMapEncodeTiled(void *map, unsigned type, unsigned rank, void *address, const uint64_t *dims,
                           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  int floats = type >= 6 && type <= 12;
  int wrong = (uintptr_t)map % 64 || type > 12 || rank == 0 || rank > 5 || (uintptr_t)address % 16 || interleave;
  wrong = wrong || swizzle < 0 || swizzle > 3 || promotion < 0 || promotion > 3 || (fill && !(fill == 1 && floats));
  if (wrong || is_wrong(type, rank, dims, strides, box, steps, swizzle)) return 1; /* CUDA_ERROR_INVALID_VALUE */
  memset(map, 0, 128);
  memcpy(map, &address, sizeof address);
  num_maps++;
  return 0;
}
