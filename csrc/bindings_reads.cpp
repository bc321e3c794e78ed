// Python's way to reads: addresses and tickets are numbers. Memory and files are kept by the caller.

#include "bindings_reads.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "bindings_check.h"
#include "reads.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace moestro {
namespace {

constexpr int64_t kSignalsEvery = 100;  // milliseconds

// Threads do not pass through a fork: in a child nothing can be asked for, and nothing is waited for at the end.
class ReadsHere {
public:
    explicit ReadsHere(int64_t num_threads) : process_(::getpid()) {
        need(num_threads >= 1 && num_threads <= kMostReaders, "a number of threads out of range");
        reads_ = std::make_unique<Reads>(static_cast<int>(num_threads));
    }
    ~ReadsHere() {
        if (process_ != ::getpid()) (void)reads_.release();
    }

    bool is_here() const { return process_ == ::getpid(); }
    int open(const std::string& path, uint64_t device, uint64_t inode, int64_t size, int64_t modified_ns, bool direct) {
        FileIdentity identity;
        identity.device = device, identity.inode = inode, identity.size = size, identity.modified_ns = modified_ns;
        return own().open(path, identity, direct);
    }
    bool is_direct(int file) {
        need(file >= 0 && file < own().num_files(), "no such file");
        return own().is_direct(file);
    }
    uint64_t submit(const std::vector<std::tuple<int, int64_t, int64_t, uint64_t>>& given, bool urgent) {
        std::vector<Run> runs;
        const int files = own().num_files();
        for (const auto& [file, offset, length, address] : given) {
            need(file >= 0 && file < files && offset >= 0 && length >= 0 && address, "no such file, bytes or memory");
            Run run;
            run.file = file, run.offset = offset, run.length = length, run.to = at<uint8_t>(address);
            runs.push_back(run);
        }
        const nb::gil_scoped_release release;
        return own().submit(runs, urgent);
    }
    // (outcome, errno, file, offset); a signal's handler may raise while it waits, and the ticket stays.
    nb::tuple wait(uint64_t ticket) {
        ReadReport report;
        while (true) {
            bool ended;
            {
                const nb::gil_scoped_release release;
                ended = own().wait(ticket, kSignalsEvery, report);
            }
            if (ended) break;
            if (PyErr_CheckSignals()) throw nb::python_error();
        }
        const char* outcome = kReadOutcomes[static_cast<int>(report.outcome)];
        return nb::make_tuple(outcome, report.error, report.file, report.offset);
    }
    bool has_ended(uint64_t ticket) { return own().has_ended(ticket); }
    void hurry(uint64_t ticket) { own().hurry(ticket); }
    bool drop(uint64_t ticket) { return own().drop(ticket); }
    nb::dict counts() {
        const ReadCounts counts = own().counts();
        nb::dict found;
        found["requests"] = counts.requests, found["bytes"] = counts.bytes;
        found["bytes_from_files"] = counts.bytes_from_files, found["system_calls"] = counts.system_calls;
        found["dropped"] = counts.dropped;
        return found;
    }

private:
    Reads& own() {
        need(is_here(), "a process that was forked from the one whose threads read");
        return *reads_;
    }

    const pid_t process_;
    std::unique_ptr<Reads> reads_;
};

}  // namespace

void bind_reads(nb::module_& m) {
    nb::class_<ReadsHere>(m, "Reads")
        .def(nb::init<int64_t>(), "num_threads"_a)
        .def("open", &ReadsHere::open, "path"_a, "device"_a, "inode"_a, "size"_a, "modified_ns"_a, "direct"_a)
        .def("is_direct", &ReadsHere::is_direct, "file"_a)
        .def("submit", &ReadsHere::submit, "runs"_a, "urgent"_a)
        .def("wait", &ReadsHere::wait, "ticket"_a)
        .def("has_ended", &ReadsHere::has_ended, "ticket"_a)
        .def("hurry", &ReadsHere::hurry, "ticket"_a)
        .def("drop", &ReadsHere::drop, "ticket"_a)
        .def("counts", &ReadsHere::counts)
        .def_prop_ro("is_here", &ReadsHere::is_here);
}

}  // namespace moestro
