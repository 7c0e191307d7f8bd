// Launches a forward kernel of a bundle without Python. On Debian it needs nlohmann-json3-dev.
//
//   g++ -std=c++17 -O2 -I /usr/local/cuda/include example.cpp -o example -lcuda
//   nvcc -std=c++17 -O2 example.cpp -o example -lcuda
//   ./example BUNDLE "b1 hq8 hkv2 q256 kv256 d64 fp16 causal"
//
// The problem must be written as in the manifest. A few rows of the last head are compared with
// softmax(q k^T * scale) v where the mask is full or causal; --no-check before BUNDLE leaves that
// out.

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>

using nlohmann::json;
using std::int64_t, std::string;

[[noreturn]] void fail(const string& why) { throw std::runtime_error(why); }

void check(CUresult result, const char* call) {
    const char* name = nullptr;  // stays null where the driver does not know the error
    if (result == CUDA_SUCCESS) return;
    cuGetErrorName(result, &name);
    fail((name ? name : "error " + std::to_string(result)) + " from " + call);
}
#define CHECK(call) check((call), #call)

struct Format {
    unsigned bytes, one, shift;  // one: the bits of 1.0; shift: from its digits to those of a float
    float unit;                  // what shifted bits are to be multiplied by
    double tolerance;            // of out
};
const std::map<string, Format> FORMATS = {{"fp16", {2, 0x3c00, 13, 0x1p112f, 4e-3}},
                                          {"bf16", {2, 0x3f80, 16, 1, 3e-2}},
                                          {"fp32", {4, 0x3f800000, 0, 1, 1e-4}}};

struct Tensor {
    string type;
    std::array<int64_t, 4> shape;  // batch, heads, rows, width: dense, in this order
    CUdeviceptr address = 0;

    int64_t stride(size_t axis) const {  // in elements; an axis of size 1 has none
        int64_t elements = shape[axis] > 1;
        for (size_t i = axis + 1; i < 4; i++) elements *= shape[i];
        return elements;
    }
    // Fills managed memory, which host and device both reach, with random x of 1 <= |x| < 2.
    void allocate(unsigned state) {
        const auto [bytes, one, shift, unit, tolerance] = FORMATS.at(type);
        const size_t size = size_t(shape[0] * shape[1] * shape[2] * shape[3]) * bytes;
        CHECK(cuMemAllocManaged(&address, size, CU_MEM_ATTACH_GLOBAL));
        for (CUdeviceptr to = address; to < address + size; to += bytes) {
            state = state * 1664525 + 1013904223;
            const unsigned digits = (state >> 8) & ((one & -one) - 1);  // one's lowest bit is above
            const unsigned bits = state >> 31 << (8 * bytes - 1) | one | digits;
            std::memcpy(reinterpret_cast<void*>(to), &bits, bytes);
        }
    }
    double at(int64_t batch, int64_t head, int64_t row, int64_t i) const {
        const auto [bytes, one, shift, unit, tolerance] = FORMATS.at(type);
        const int64_t index = batch * stride(0) + head * stride(1) + row * stride(2) + i;
        unsigned bits = 0, sign = 1u << (8 * bytes - 1);
        std::memcpy(&bits, reinterpret_cast<void*>(address + size_t(index) * bytes), bytes);
        const unsigned magnitude = (bits & ~sign) << shift;
        float value;
        std::memcpy(&value, &magnitude, sizeof value);
        return double(value) * unit * (bits & sign ? -1 : 1);
    }
};
using Tensors = std::map<string, Tensor>;

double error_of_row(const Tensors& all, int64_t row, double scale, bool causal) {
    const Tensor &q = all.at("q"), &k = all.at("k"), &v = all.at("v");
    const int64_t batch = q.shape[0] - 1, head = q.shape[1] - 1, head_kv = k.shape[1] - 1;
    std::vector<double> sums(size_t(v.shape[3]) + 1);  // the last one: of the weights themselves
    for (int64_t n = 0; n < (causal ? std::min(row + 1, k.shape[2]) : k.shape[2]); n++) {
        double dot = 0;
        for (int64_t i = 0; i < q.shape[3]; i++)
            dot += q.at(batch, head, row, i) * k.at(batch, head_kv, n, i);
        const double weight = std::exp(dot * scale);  // of numbers below 2: a double holds it
        for (int64_t i = 0; i < v.shape[3]; i++)
            sums[size_t(i)] += weight * v.at(batch, head_kv, n, i);
        sums.back() += weight;
    }
    double largest = 0;
    for (int64_t i = 0; i < v.shape[3]; i++) {
        const double expected = sums[size_t(i)] / sums.back();
        const double error = std::abs(all.at("out").at(batch, head, row, i) - expected);
        largest = std::isnan(error) ? INFINITY : std::max(largest, error);
    }
    return largest;
}

json forward_of(const json& manifest, const string& problem, const string& arch) {
    string others;
    for (const json& one : manifest.at("problems")) {
        others += "; " + one.at("arch").get<string>() + " " + one.at("problem").get<string>();
        if (one.at("problem") != problem || one.at("arch") != arch) continue;
        const json kernels = one.value("forward", json::array());
        for (const json& binary : manifest.at("binaries"))
            if (kernels.size() == 1 && binary.at("file") == kernels[0].at("file")) return binary;
        fail("'" + problem + "' has no forward of one kernel, and this example launches no other");
    }
    fail("no '" + problem + "' for this device, " + arch + "; the bundle has" + others.substr(1));
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

    std::ifstream manifest_file(bundle + "/manifest.json");
    if (!manifest_file) fail("cannot read " + bundle + "/manifest.json");
    const json manifest = json::parse(manifest_file);
    if (manifest.at("schema") != 2) fail("the bundle is not of schema 2, which this example reads");
    const string arch = "sm_" + std::to_string(major) + std::to_string(minor);
    const json binary = forward_of(manifest, problem, arch);

    std::smatch part;
    const string form = R"(b(\d+) hq(\d+) hkv(\d+) q(\d+) kv(\d+) d(\d+)(?:/(\d+))? (\w+) (.+))";
    if (!std::regex_match(problem, part, std::regex(form))) fail("cannot read " + problem);
    const auto number = [&](size_t i) { return int64_t(std::stoll(part[i])); };
    const int64_t batch = number(1), heads_q = number(2), heads_kv = number(3);
    const int64_t seqlen_q = number(4), seqlen_kv = number(5);
    const int64_t dim_qk = number(6), dim_v = part[7].matched ? number(7) : dim_qk;
    const string type = part[8], mask = part[9];  // with the score, where there is one
    const double scale = 1 / std::sqrt(double(dim_qk));
    Tensors tensors = {{"q", {type, {batch, heads_q, seqlen_q, dim_qk}}},
                       {"k", {type, {batch, heads_kv, seqlen_kv, dim_qk}}},
                       {"v", {type, {batch, heads_kv, seqlen_kv, dim_v}}},
                       {"out", {type, {batch, heads_q, seqlen_q, dim_v}}},
                       {"lse", {"fp32", {batch, heads_q, seqlen_q, 1}}}};

    // What this example can give a kernel, by name: the type, and bytes that begin with the value.
    std::map<string, std::pair<string, int64_t>> known = {
        {"batch", {"i32", batch}},           {"num_heads_q", {"i32", heads_q}},
        {"num_heads_kv", {"i32", heads_kv}}, {"seqlen_q", {"i32", seqlen_q}},
        {"seqlen_kv", {"i32", seqlen_kv}},   {"scratch_0", {"*u8", 0}},
        {"scratch_1", {"*u8", 0}}};  // unused by these kernels: null
    for (auto& [name, tensor] : tensors) {
        tensor.allocate(unsigned(known.size()));
        known[name + "_ptr"] = {"*" + tensor.type, int64_t(tensor.address)};
        const string axes = name == "k" || name == "v" ? "bhn" : "bhm";
        for (size_t i = 0; i < 3; i++)
            known["stride_" + name.substr(0, 1) + axes[i]] = {
                "i32", tensor.stride(i) / binary.at("stride_unit").get<int>()};
    }
    const float natural = float(scale), base_2 = float(scale * std::log2(std::exp(1)));
    std::memcpy(&(known["softmax_scale"] = {"fp32", 0}).second, &natural, 4);
    std::memcpy(&(known["softmax_scale_log2"] = {"fp32", 0}).second, &base_2, 4);

    std::vector<void*> arguments;  // the driver knows the size of each
    for (const json& one : binary.at("arguments")) {
        const string name = one.at("name"), its_type = one.at("type");
        if (!known.count(name)) fail("cannot fill the argument " + name + " of type " + its_type);
        auto& [known_type, value] = known.at(name);
        if (its_type != known_type || (its_type == "i32" && value > INT32_MAX))
            fail("the argument " + name + " does not fit its type, " + its_type);
        arguments.push_back(&value);
    }
    int64_t grid = 1;
    for (const json& one : binary.at("grid")) {
        const int64_t size = known.at(one.at("size")).second, divisor = one.at("divisor");
        grid *= (size + divisor - 1) / divisor;
    }

    CUmodule module;
    CUfunction function;
    const string file = binary.at("file"), name = binary.at("function");
    const int threads = binary.at("threads"), shared = binary.at("shared_bytes");
    CHECK(cuModuleLoad(&module, (bundle + "/" + file).c_str()));
    CHECK(cuModuleGetFunction(&function, module, name.c_str()));
    const auto allowed = CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;  // 48 KiB until it is set
    CHECK(cuFuncSetAttribute(function, allowed, shared));
    CHECK(cuLaunchKernel(function, unsigned(grid), 1, 1, unsigned(threads), 1, 1, unsigned(shared),
                         nullptr, arguments.data(), nullptr));
    CHECK(cuCtxSynchronize());
    std::cout << "launched " << file << ": " << grid << " x " << threads << " threads, " << shared
              << " bytes of shared memory; ";
    if (!compare || (mask != "full" && mask != "causal")) {
        std::cout << "not checked" << (compare ? ", as the mask is " + mask : "") << "\n";
        return;
    }
    double error = 0;
    for (const int64_t row : {int64_t(0), seqlen_q / 3, seqlen_q / 2, seqlen_q - 1})
        error = std::max(error, error_of_row(tensors, row, scale, mask == "causal"));
    const double tolerance = FORMATS.at(type).tolerance;
    std::cout << "largest error " << error << " of " << tolerance << " allowed\n";
    if (error > tolerance) fail("the results are wrong");
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
