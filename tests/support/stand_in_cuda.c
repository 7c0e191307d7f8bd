/* A stand-in for libcuda.so.1, for tests on machines without a GPU: programs that use the CUDA
   driver load it and run.

     cc -shared -fPIC -I triton/backends/nvidia/include stand_in_cuda.c -o libcuda.so.1

   It refuses what the driver refuses, as far as launching a cubin goes, and runs no kernel: memory
   is the host's, and zero until something is copied to it. Launches are noted down in a file
   instead. Environment:

   STAND_IN_CUDA_CAPABILITY  of the one device; 9.0 if unset
   STAND_IN_CUDA_LOG         the file; one JSON object a line: function, grid, block, shared_bytes,
                             stream, parameters (each the hexadecimal digits of its bytes as they
                             lie in memory)
   STAND_IN_CUDA_PARAMETERS  sizes of a kernel's parameters in bytes, one digit each, such as 88844;
                             no launch without it
*/

#define _GNU_SOURCE
#include <cuda.h>
#include <elf.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STATIC_SHARED = 48 * 1024, MAX_SHARED = 227 * 1024, MAX_THREADS = 1024, MAX_FUNCTIONS = 16 };

typedef struct {
    char name[256];
    int max_dynamic_shared;
} Function; /* behind CUkernel and CUfunction alike: either can be launched */

typedef struct {
    char* elf; /* a copy: callers may free theirs */
    Function functions[MAX_FUNCTIONS];
    int num_functions;
} Image; /* behind CUlibrary and CUmodule alike */

static bool is_initialised;
static int primary_context;             /* its address is the context */
static _Thread_local CUcontext current; /* as in the driver, every thread sets its own */

#define NEED(condition, error)            \
    do {                                  \
        if (!(condition)) return (error); \
    } while (0)
#define NEED_DRIVER() NEED(is_initialised, CUDA_ERROR_NOT_INITIALIZED)
#define NEED_CONTEXT()                             \
    do {                                           \
        NEED_DRIVER();                             \
        NEED(current, CUDA_ERROR_INVALID_CONTEXT); \
    } while (0)
#define NEED_DEVICE(device)                             \
    do {                                                \
        NEED_DRIVER();                                  \
        NEED((device) == 0, CUDA_ERROR_INVALID_DEVICE); \
    } while (0)

/* ---- the driver, its one device, contexts */

CUresult CUDAAPI cuInit(unsigned int flags) {
    NEED(flags == 0, CUDA_ERROR_INVALID_VALUE);
    is_initialised = true;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDriverGetVersion(int* version) {
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
    NEED_DRIVER();
    *count = 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    NEED_DEVICE(ordinal);
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    NEED_DEVICE(device);
    const char* capability = getenv("STAND_IN_CUDA_CAPABILITY");
    int major, minor;
    NEED(sscanf(capability ? capability : "9.0", "%d.%d", &major, &minor) == 2, CUDA_ERROR_UNKNOWN);
    switch ((int)attribute) {
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = major; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = minor; return CUDA_SUCCESS;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            *value = MAX_SHARED;
            return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    NEED_DEVICE(device);
    *context = (CUcontext)&primary_context;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice device) {
    NEED_DEVICE(device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    NEED_DRIVER();
    NEED(!context || context == (CUcontext)&primary_context, CUDA_ERROR_INVALID_CONTEXT);
    current = context;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
    NEED_DRIVER();
    *context = current;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
    NEED_CONTEXT();
    *device = 0;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize(void) {
    NEED_CONTEXT();
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    (void)stream;
    NEED_CONTEXT();
    return CUDA_SUCCESS;
}

/* ---- memory */

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    NEED_CONTEXT();
    NEED(bytes, CUDA_ERROR_INVALID_VALUE);
    void* memory;
    NEED(!posix_memalign(&memory, 256, bytes), CUDA_ERROR_OUT_OF_MEMORY);
    *address = (CUdeviceptr)memset(memory, 0, bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned int flags) {
    NEED(flags == CU_MEM_ATTACH_GLOBAL, CUDA_ERROR_NOT_SUPPORTED);
    return cuMemAlloc(address, bytes);
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    NEED_CONTEXT();
    free((void*)address);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t bytes) {
    NEED_CONTEXT();
    memcpy((void*)to, from, bytes);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemcpyDtoH(void* to, CUdeviceptr from, size_t bytes) {
    NEED_CONTEXT();
    memcpy(to, (const void*)from, bytes);
    return CUDA_SUCCESS;
}

/* ---- binaries: the driver is given no size, so that it must follow from the ELF itself */

static const Elf64_Shdr* sections(const char* elf) {
    return (const Elf64_Shdr*)(elf + ((const Elf64_Ehdr*)elf)->e_shoff);
}

static size_t elf_bytes(const char* elf) {
    const Elf64_Ehdr* header = (const Elf64_Ehdr*)elf;
    size_t end = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
    size_t programs_end = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
    if (programs_end > end) end = programs_end;
    for (int i = 0; i < header->e_shnum; i++) {
        const Elf64_Shdr* one = &sections(elf)[i];
        if (one->sh_type != SHT_NOBITS && one->sh_offset + one->sh_size > end)
            end = one->sh_offset + one->sh_size;
    }
    return end;
}

static bool has_kernel(const char* elf, const char* name) { /* its code is the section .text.NAME */
    const Elf64_Ehdr* header = (const Elf64_Ehdr*)elf;
    const char* names = elf + sections(elf)[header->e_shstrndx].sh_offset;
    for (int i = 0; i < header->e_shnum; i++) {
        const char* section = names + sections(elf)[i].sh_name;
        if (!strncmp(section, ".text.", 6) && !strcmp(section + 6, name)) return true;
    }
    return false;
}

static CUresult load(Image** image, const void* code) {
    NEED(code && !memcmp(code, ELFMAG, SELFMAG), CUDA_ERROR_INVALID_IMAGE);
    NEED(((const char*)code)[EI_CLASS] == ELFCLASS64, CUDA_ERROR_INVALID_IMAGE);
    size_t bytes = elf_bytes(code);
    *image = calloc(1, sizeof(Image));
    (*image)->elf = memcpy(malloc(bytes), code, bytes);
    return CUDA_SUCCESS;
}

static CUresult unload(Image* image) {
    free(image->elf);
    free(image);
    return CUDA_SUCCESS;
}

static CUresult find(Function** function, Image* image, const char* name) {
    NEED(strlen(name) < sizeof image->functions[0].name && has_kernel(image->elf, name),
         CUDA_ERROR_NOT_FOUND);
    for (int i = 0; i < image->num_functions; i++) {
        *function = &image->functions[i];
        if (!strcmp((*function)->name, name)) return CUDA_SUCCESS;
    }
    NEED(image->num_functions < MAX_FUNCTIONS, CUDA_ERROR_OUT_OF_MEMORY);
    *function = &image->functions[image->num_functions++];
    strcpy((*function)->name, name);
    (*function)->max_dynamic_shared = STATIC_SHARED;
    return CUDA_SUCCESS;
}

static CUresult set(Function* function, CUfunction_attribute attribute, int value) {
    NEED(attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CUDA_ERROR_NOT_SUPPORTED);
    NEED(value >= 0 && value <= MAX_SHARED, CUDA_ERROR_INVALID_VALUE);
    function->max_dynamic_shared = value;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option* jit,
                                   void** jit_values, unsigned int num_jit,
                                   CUlibraryOption* options, void** values,
                                   unsigned int num_options) {
    (void)jit, (void)jit_values, (void)options, (void)values;
    NEED_DRIVER();
    NEED(!num_jit && !num_options, CUDA_ERROR_NOT_SUPPORTED);
    return load((Image**)library, code);
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
    NEED_DRIVER();
    return unload((Image*)library);
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    NEED_DRIVER();
    return find((Function**)kernel, (Image*)library, name);
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    NEED_CONTEXT();
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                      CUdevice device) {
    NEED_DEVICE(device);
    return set((Function*)kernel, attribute, value);
}

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* code) {
    NEED_CONTEXT();
    return load((Image**)module, code);
}

CUresult CUDAAPI cuModuleLoad(CUmodule* module, const char* path) {
    NEED_CONTEXT();
    FILE* file = fopen(path, "rb");
    NEED(file, CUDA_ERROR_FILE_NOT_FOUND);
    fseek(file, 0, SEEK_END);
    size_t bytes = (size_t)ftell(file);
    char* code = calloc(1, bytes + sizeof(Elf64_Ehdr)); /* so that an ELF's header can be read */
    rewind(file);
    bool is_whole = fread(code, 1, bytes, file) == bytes;
    fclose(file);
    CUresult result = is_whole ? load((Image**)module, code) : CUDA_ERROR_OPERATING_SYSTEM;
    free(code);
    return result;
}

CUresult CUDAAPI cuModuleUnload(CUmodule module) {
    NEED_CONTEXT();
    return unload((Image*)module);
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    NEED_CONTEXT();
    return find((Function**)function, (Image*)module, name);
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute,
                                    int value) {
    NEED_CONTEXT();
    return set((Function*)function, attribute, value);
}

/* ---- launches */

CUresult CUDAAPI cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                void** parameters, void** extra) {
    const Function* launched = (const Function*)function;
    const char *log = getenv("STAND_IN_CUDA_LOG"), *sizes = getenv("STAND_IN_CUDA_PARAMETERS");
    NEED_CONTEXT();
    NEED(launched, CUDA_ERROR_INVALID_HANDLE);
    NEED(grid_x && grid_y && grid_z && grid_x <= 0x7fffffff, CUDA_ERROR_INVALID_VALUE);
    NEED(block_x && block_y && block_z, CUDA_ERROR_INVALID_VALUE);
    NEED((unsigned long long)block_x * block_y * block_z <= MAX_THREADS, CUDA_ERROR_INVALID_VALUE);
    NEED(shared_bytes <= (unsigned int)launched->max_dynamic_shared, CUDA_ERROR_INVALID_VALUE);
    NEED(parameters && !extra && sizes, CUDA_ERROR_INVALID_VALUE);
    FILE* file = fopen(log ? log : "/dev/null", "a");
    NEED(file, CUDA_ERROR_OPERATING_SYSTEM);
    fprintf(file, "{\"function\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ",
            launched->name, grid_x, grid_y, grid_z, block_x, block_y, block_z);
    fprintf(file, "\"shared_bytes\": %u, \"stream\": %llu, \"parameters\": [", shared_bytes,
            (unsigned long long)(size_t)stream);
    for (int i = 0; sizes[i]; i++) {
        fputs(i ? ", \"" : "\"", file);
        for (int byte = 0; byte < sizes[i] - '0'; byte++)
            fprintf(file, "%02x", ((unsigned char*)parameters[i])[byte]);
        fputs("\"", file);
    }
    fputs("]}\n", file);
    fclose(file);
    return CUDA_SUCCESS;
}

/* ---- names */

#define ERRORS(_)                                                                          \
    _(CUDA_SUCCESS, "no error")                                                            \
    _(CUDA_ERROR_INVALID_VALUE, "invalid argument")                                        \
    _(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                           \
    _(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                                  \
    _(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                                 \
    _(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid")                          \
    _(CUDA_ERROR_FILE_NOT_FOUND, "file not found")                                         \
    _(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                                \
    _(CUDA_ERROR_OPERATING_SYSTEM, "OS call failed or operation not supported on this OS") \
    _(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                                \
    _(CUDA_ERROR_NOT_FOUND, "named symbol not found")                                      \
    _(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                                 \
    _(CUDA_ERROR_UNKNOWN, "unknown error")

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** text) {
#define NAME(code, description) \
    case code: *text = #code; return CUDA_SUCCESS;
    switch ((int)error) { ERRORS(NAME) }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
#define DESCRIPTION(code, description) \
    case code: *text = description; return CUDA_SUCCESS;
    switch ((int)error) { ERRORS(DESCRIPTION) }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

/* A function is asked for by its plain name; cuda.h's macros turn some names into those of the
   newest version, such as cuMemAlloc_v2. */
CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** function, int version,
                                  cuuint64_t flags, CUdriverProcAddressQueryResult* status) {
    (void)version, (void)flags;
#define ENTRY(name)        \
    {                      \
        #name, (void*)name \
    }
    static const struct {
        const char* name;
        void* function;
    } known[] = {
        ENTRY(cuInit),
        ENTRY(cuGetProcAddress),
        ENTRY(cuDriverGetVersion),
        ENTRY(cuGetErrorName),
        ENTRY(cuGetErrorString),
        ENTRY(cuDeviceGetCount),
        ENTRY(cuDeviceGet),
        ENTRY(cuDeviceGetAttribute),
        ENTRY(cuDevicePrimaryCtxRetain),
        ENTRY(cuDevicePrimaryCtxRelease),
        ENTRY(cuCtxSetCurrent),
        ENTRY(cuCtxGetCurrent),
        ENTRY(cuCtxGetDevice),
        ENTRY(cuCtxSynchronize),
        ENTRY(cuStreamSynchronize),
        ENTRY(cuMemAlloc),
        ENTRY(cuMemAllocManaged),
        ENTRY(cuMemFree),
        ENTRY(cuMemcpyHtoD),
        ENTRY(cuMemcpyDtoH),
        ENTRY(cuLibraryLoadData),
        ENTRY(cuLibraryUnload),
        ENTRY(cuLibraryGetKernel),
        ENTRY(cuKernelGetFunction),
        ENTRY(cuKernelSetAttribute),
        ENTRY(cuModuleLoad),
        ENTRY(cuModuleLoadData),
        ENTRY(cuModuleUnload),
        ENTRY(cuModuleGetFunction),
        ENTRY(cuFuncSetAttribute),
        ENTRY(cuLaunchKernel),
    };
    *function = NULL;
    for (size_t i = 0; i < sizeof known / sizeof known[0] && !*function; i++)
        if (!strcmp(symbol, known[i].name)) *function = known[i].function;
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
