// What example.cpp and example_cpu.cpp share: a problem with its tensors, the arguments of a
// bundle's kernel by name, and a check of the results.

#pragma once

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
#include <stdexcept>
#include <string>
#include <vector>

using nlohmann::json;
using std::int64_t, std::string;

[[noreturn]] inline void fail(const string& why) { throw std::runtime_error(why); }

struct Format {
    unsigned bytes, one, shift;  // one: the bits of 1.0; shift: from its digits to those of a float
    float unit;                  // what shifted bits are to be multiplied by
    double tolerance;            // of out
};
inline const std::map<string, Format> FORMATS = {{"fp16", {2, 0x3c00, 13, 0x1p112f, 4e-3}},
                                                 {"bf16", {2, 0x3f80, 16, 1, 3e-2}},
                                                 {"fp32", {4, 0x3f800000, 0, 1, 1e-4}}};

struct Tensor {
    string type;
    std::array<int64_t, 4> shape;  // batch, heads, rows, width: dense, in this order
    char* memory = nullptr;

    int64_t stride(size_t axis) const {  // in elements; an axis of size 1 has none
        int64_t elements = shape[axis] > 1;
        for (size_t i = axis + 1; i < 4; i++) elements *= shape[i];
        return elements;
    }
    size_t bytes() const {
        return size_t(shape[0] * shape[1] * shape[2] * shape[3]) * FORMATS.at(type).bytes;
    }
    // Fills memory with random x of 1 <= |x| < 2.
    void fill(unsigned state) const {
        const auto [bytes, one, shift, unit, tolerance] = FORMATS.at(type);
        for (char* to = memory; to < memory + this->bytes(); to += bytes) {
            state = state * 1664525 + 1013904223;
            const unsigned digits = (state >> 8) & ((one & -one) - 1);  // one's lowest bit is above
            const unsigned bits = state >> 31 << (8 * bytes - 1) | one | digits;
            std::memcpy(to, &bits, bytes);
        }
    }
    double at(int64_t batch, int64_t head, int64_t row, int64_t i) const {
        const auto [bytes, one, shift, unit, tolerance] = FORMATS.at(type);
        const int64_t index = batch * stride(0) + head * stride(1) + row * stride(2) + i;
        unsigned bits = 0, sign = 1u << (8 * bytes - 1);
        std::memcpy(&bits, memory + size_t(index) * bytes, bytes);
        const unsigned magnitude = (bits & ~sign) << shift;
        float value;
        std::memcpy(&value, &magnitude, sizeof value);
        return double(value) * unit * (bits & sign ? -1 : 1);
    }
};

inline json manifest_of(const string& bundle) {
    std::ifstream file(bundle + "/manifest.json");
    if (!file) fail("cannot read " + bundle + "/manifest.json");
    const json manifest = json::parse(file);
    const int schema = manifest.at("schema");
    if (schema != 2 && schema != 3) fail("the bundle is not of schema 2 or 3, which this example reads");
    return manifest;
}

inline json forward_of(const json& manifest, const string& problem, const string& arch) {
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

// A forward with tensors of its own.
struct Call {
    string type, mask;  // the mask with the score, where there is one
    double scale;
    std::map<string, Tensor> tensors;
    std::vector<int64_t> arguments;  // in order; pointers fill a word, others begin it
    int64_t grid = 1;                // programs

    // `allocate` returns memory that is aligned to 16 bytes, and that the host can write.
    Call(const json& binary, const string& problem, char* (*allocate)(size_t)) {
        std::smatch part;
        const string form =
            R"(b(\d+) hq(\d+) hkv(\d+) q(\d+) kv(\d+) d(\d+)(?:/(\d+))? (\w+) (.+))";
        if (!std::regex_match(problem, part, std::regex(form))) fail("cannot read " + problem);
        const auto number = [&](size_t i) { return int64_t(std::stoll(part[i])); };
        const int64_t batch = number(1), heads_q = number(2), heads_kv = number(3);
        const int64_t seqlen_q = number(4), seqlen_kv = number(5);
        const int64_t dim_qk = number(6), dim_v = part[7].matched ? number(7) : dim_qk;
        type = part[8], mask = part[9];
        scale = 1 / std::sqrt(double(dim_qk));
        tensors = {{"q", {type, {batch, heads_q, seqlen_q, dim_qk}}},
                   {"k", {type, {batch, heads_kv, seqlen_kv, dim_qk}}},
                   {"v", {type, {batch, heads_kv, seqlen_kv, dim_v}}},
                   {"out", {type, {batch, heads_q, seqlen_q, dim_v}}},
                   {"lse", {"fp32", {batch, heads_q, seqlen_q, 1}}}};

        // What this example can give a kernel, by name: the type, and bytes that begin with the
        // value.
        std::map<string, std::pair<string, int64_t>> known = {
            {"batch", {"i32", batch}},           {"num_heads_q", {"i32", heads_q}},
            {"num_heads_kv", {"i32", heads_kv}}, {"seqlen_q", {"i32", seqlen_q}},
            {"seqlen_kv", {"i32", seqlen_kv}},   {"scratch_0", {"*u8", 0}},
            {"scratch_1", {"*u8", 0}}};  // unused by these kernels: null
        for (auto& [name, tensor] : tensors) {
            tensor.memory = allocate(tensor.bytes());
            tensor.fill(unsigned(known.size()));
            known[name + "_ptr"] = {"*" + tensor.type, reinterpret_cast<int64_t>(tensor.memory)};
            const string axes = name == "k" || name == "v" ? "bhn" : "bhm";
            for (size_t i = 0; i < 3; i++)
                known["stride_" + name.substr(0, 1) + axes[i]] = {
                    "i32", tensor.stride(i) / binary.at("stride_unit").get<int>()};
        }
        const float natural = float(scale), base_2 = float(scale * std::log2(std::exp(1)));
        std::memcpy(&(known["softmax_scale"] = {"fp32", 0}).second, &natural, 4);
        std::memcpy(&(known["softmax_scale_log2"] = {"fp32", 0}).second, &base_2, 4);

        for (const json& one : binary.at("arguments")) {
            const string name = one.at("name"), its_type = one.at("type");
            if (!known.count(name))
                fail("cannot fill the argument " + name + " of type " + its_type);
            const auto& [known_type, value] = known.at(name);
            if (its_type != known_type || (its_type == "i32" && value > INT32_MAX))
                fail("the argument " + name + " does not fit its type, " + its_type);
            arguments.push_back(value);
        }
        for (const json& one : binary.at("grid")) {
            const int64_t size = known.at(one.at("size")).second, divisor = one.at("divisor");
            grid *= (size + divisor - 1) / divisor;
        }
    }

    double error_of_row(int64_t row) const {  // of the last head of the last batch
        const Tensor &q = tensors.at("q"), &k = tensors.at("k"), &v = tensors.at("v");
        const int64_t batch = q.shape[0] - 1, head = q.shape[1] - 1, head_kv = k.shape[1] - 1;
        const int64_t keys = mask == "causal" ? std::min(row + 1, k.shape[2]) : k.shape[2];
        std::vector<double> sums(size_t(v.shape[3]) + 1);  // the last one: of the weights
        for (int64_t n = 0; n < keys; n++) {
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
            const double error = std::abs(tensors.at("out").at(batch, head, row, i) - expected);
            largest = std::isnan(error) ? INFINITY : std::max(largest, error);
        }
        return largest;
    }

    // Compares a few rows of the last head with softmax(q k^T * scale) v, where the mask is full or
    // causal, and says what came of it.
    void check(bool compare) const {
        if (!compare || (mask != "full" && mask != "causal")) {
            std::cout << "not checked" << (compare ? ", as the mask is " + mask : "") << "\n";
            return;
        }
        double error = 0;
        const int64_t rows = tensors.at("q").shape[2];
        for (const int64_t row : {int64_t(0), rows / 3, rows / 2, rows - 1})
            error = std::max(error, error_of_row(row));
        const double tolerance = FORMATS.at(type).tolerance;
        std::cout << "largest error " << error << " of " << tolerance << " allowed\n";
        if (error > tolerance) fail("the results are wrong");
    }
};
