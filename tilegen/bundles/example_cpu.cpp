// Launches a forward kernel of a bundle on this machine's processor, on threads of its own and
// without Python. On Debian it needs nlohmann-json3-dev.
//
//   g++ -std=c++17 -O2 -pthread example_cpu.cpp -o example_cpu -ldl
//   ./example_cpu BUNDLE x86-64-v3 "b1 hq8 hkv2 q256 kv256 d64 fp16 causal"
//
// The problem must be written as in the manifest. A few rows of the last head are checked where the
// mask is full or causal; --no-check before BUNDLE leaves that out. Opening an object runs code: a
// program must trust who wrote it, as tilegen.load_bundle does only for files of its user.

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <set>
#include <sstream>
#include <thread>

#include "example.hpp"

#ifndef CPUINFO
#define CPUINFO "/proc/cpuinfo"
#endif

// What the threads of a launch share: eight words.
struct Launch {
    std::atomic<int32_t> started{0}, taken{0};  // threads, programs
    const int64_t* arguments;
    char* scratch;
    int64_t scratch_stride;  // bytes from the scratch memory of a thread to that of the next
    void* unused = nullptr;
    int64_t grid, grid_y = 1, grid_z = 1;
};
static_assert(sizeof(Launch) == 64);

char* aligned(size_t bytes) {
    // A multiple of the alignment, as aligned_alloc wants it.
    char* memory = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    if (!memory) fail("no memory for " + std::to_string(bytes) + " bytes");
    return memory;
}

// Reads the first core's features: all cores of a processor have the same.
std::set<string> features_here() {
    std::ifstream file(CPUINFO);
    for (string line; std::getline(file, line);) {
        if (line.rfind("flags", 0) && line.rfind("Features", 0)) continue;
        std::istringstream words(line.substr(line.find(':') + 1));
        return {std::istream_iterator<string>(words), {}};
    }
    return {};
}

void run(const string& bundle, const string& arch, const string& problem, bool compare) {
    const json binary = forward_of(manifest_of(bundle), problem, arch);
    const std::set<string> here = features_here();
    for (const string feature : binary.at("on_cpu").at("features"))
        if (!here.count(feature))
            fail("this processor lacks " + feature + ", which code for " + arch + " needs");
    Call call(binary, problem, aligned);

    const string file = binary.at("file"), name = binary.at("function");
    void* object = dlopen((bundle + "/" + file).c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!object) fail(dlerror());
    const auto work = reinterpret_cast<void (*)(Launch*)>(dlsym(object, name.c_str()));
    if (!work) fail(dlerror());

    const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
    const int64_t threads = std::min(cores, call.grid);
    const int64_t bytes = binary.at("on_cpu").at("scratch_bytes");
    Launch launch;
    launch.arguments = call.arguments.data();
    launch.scratch_stride = (bytes + 4095) / 4096 * 4096 + 64;  // not all in the same cache sets
    launch.scratch = aligned(size_t(threads * launch.scratch_stride));
    launch.grid = call.grid;
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; i++) others.emplace_back(work, &launch);
    work(&launch);  // returns when no program is left; others may still compute theirs
    for (std::thread& other : others) other.join();
    std::cout << "launched " << file << ": " << call.grid << " programs on " << threads
              << " threads; ";
    call.check(compare);
}

int main(int count, char** arguments) try {
    std::vector<string> given(arguments + 1, arguments + count);
    const bool compare = given.empty() || given[0] != "--no-check";
    if (!compare) given.erase(given.begin());
    if (given.size() != 3) fail("usage: example_cpu [--no-check] BUNDLE ARCH PROBLEM");
    run(given[0], given[1], given[2], compare);
} catch (const std::exception& error) {
    std::cerr << "example_cpu: " << error.what() << "\n";
    return 1;
}
