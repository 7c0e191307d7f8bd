// Launches a forward kernel of a bundle on a GPU without Python. On Debian it needs
// nlohmann-json3-dev.
//
//   g++ -std=c++17 -O2 -I /usr/local/cuda/include example.cpp -o example -lcuda
//   nvcc -std=c++17 -O2 example.cpp -o example -lcuda
//   ./example BUNDLE "b1 hq8 hkv2 q256 kv256 d64 fp16 causal"
//
// The problem must be written as in the manifest. A few rows of the last head are checked where the
// mask is full or causal; --no-check before BUNDLE leaves that out.

#include <cuda.h>

#include "example.hpp"

void check(CUresult result, const char* call) {
    const char* name = nullptr;  // stays null where the driver does not know the error
    if (result == CUDA_SUCCESS) return;
    cuGetErrorName(result, &name);
    fail((name ? name : "error " + std::to_string(result)) + " from " + call);
}
#define CHECK(call) check((call), #call)

// Returns managed memory, which host and device both reach.
char* managed(size_t bytes) {
    CUdeviceptr address;
    CHECK(cuMemAllocManaged(&address, bytes, CU_MEM_ATTACH_GLOBAL));
    return reinterpret_cast<char*>(address);
}

void run(const string& bundle, const string& problem, bool compare) {
    CUdevice device;
    CUcontext context;
    int major, minor;
    CHECK(cuInit(0));
    CHECK(cuDeviceGet(&device, 0));
    CHECK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    CHECK(cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device));
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));

    const string arch = "sm_" + std::to_string(major) + std::to_string(minor);
    const json binary = forward_of(manifest_of(bundle), problem, arch);
    Call call(binary, problem, managed);
    std::vector<void*> arguments;  // the driver knows the size of each
    for (int64_t& value : call.arguments) arguments.push_back(&value);

    CUmodule module;
    CUfunction function;
    const string file = binary.at("file"), name = binary.at("function");
    const int threads = binary.at("threads"), shared = binary.at("shared_bytes");
    CHECK(cuModuleLoad(&module, (bundle + "/" + file).c_str()));
    CHECK(cuModuleGetFunction(&function, module, name.c_str()));
    const auto allowed = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;  // 48 KiB until it is set
    CHECK(cuFuncSetAttribute(function, allowed, shared));
    CHECK(cuLaunchKernel(function, unsigned(call.grid), 1, 1, unsigned(threads), 1, 1,
                         unsigned(shared), nullptr, arguments.data(), nullptr));
    CHECK(cuCtxSynchronize());
    std::cout << "launched " << file << ": " << call.grid << " x " << threads << " threads, "
              << shared << " bytes of shared memory; ";
    call.check(compare);
}

int main(int count, char** arguments) try {
    std::vector<string> given(arguments + 1, arguments + count);
    const bool compare = given.empty() || given[0] != "--no-check";
    if (!compare) given.erase(given.begin());
    if (given.size() != 2) fail("usage: example [--no-check] BUNDLE PROBLEM");
    run(given[0], given[1], compare);
} catch (const std::exception& error) {
    std::cerr << "example: " << error.what() << "\n";
    return 1;
}
