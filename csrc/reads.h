// Pieces of files, read into memory by threads of their own: those of demand before those of a guess.
//
// A request is some runs of bytes, of one file or of several, and is whole once all of them are. Where the filesystem
// takes it, files are read past the system's cache (O_DIRECT), whole blocks at a time; what is asked for need not be
// whole blocks.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace moestro {

constexpr int kMostReaders = 64;
constexpr int64_t kReadBlock = 4096;       // offsets, lengths and addresses of direct reads are multiples of it
constexpr int64_t kReadPiece = 2 << 20;    // what a thread takes at once
constexpr int64_t kBounceBytes = 1 << 20;  // of a thread: blocks, of which a part is copied out

// Changes where a path comes to name another file, or a file is written to or cut.
struct FileIdentity {
    uint64_t device = 0, inode = 0;
    int64_t size = 0, modified_ns = 0;

    bool operator==(const FileIdentity& other) const {
        return device == other.device && inode == other.inode && size == other.size && modified_ns == other.modified_ns;
    }
};

struct Run {
    int file = 0;
    int64_t offset = 0, length = 0;
    uint8_t* to = nullptr;
};

enum class ReadOutcome { done, dropped, system_error, cut_off, changed, gone };
constexpr const char* kReadOutcomes[] = {"done", "dropped", "system_error", "cut_off", "changed", "gone"};

struct ReadReport {
    ReadOutcome outcome = ReadOutcome::done;
    int error = 0;  // errno of a system_error
    int file = 0;   // that it is about
    int64_t offset = 0;
};

// Since the start: requests, bytes that they asked for, bytes that files gave, and calls of the system that read.
struct ReadCounts {
    int64_t requests = 0, bytes = 0, bytes_from_files = 0, system_calls = 0, dropped = 0;
};

class Reads {
public:
    explicit Reads(int num_threads);
    ~Reads();
    Reads(const Reads&) = delete;
    Reads& operator=(const Reads&) = delete;

    // A number for a file, or minus errno. Requests fail once the file is not `identity` any more.
    int open(const std::string& path, const FileIdentity& identity, bool direct);
    bool is_direct(int file) const;
    int num_files() const;
    // A ticket; runs lie in files that are open. Memory is written to until the ticket was waited for, or dropped.
    uint64_t submit(const std::vector<Run>& runs, bool urgent);
    // Makes a request urgent that was not.
    void hurry(uint64_t ticket);
    // Whether the request had not begun, and now never will.
    bool drop(uint64_t ticket);
    // False after so many milliseconds without an end; after an end the ticket is gone.
    bool wait(uint64_t ticket, int64_t milliseconds, ReadReport& report);
    bool knows(uint64_t ticket) const;
    // Whether `wait` would not wait.
    bool has_ended(uint64_t ticket) const;
    ReadCounts counts() const;

private:
    struct File {
        std::string path;
        FileIdentity identity;
        int descriptor = -1;
        bool direct = false;
    };
    struct Request {
        std::vector<Run> pieces, runs;
        size_t next = 0, unfinished = 0;
        bool urgent = false, ended = false;
        ReadReport report;
    };

    void work();
    void read_piece(const Run& piece, uint8_t* bounce, ReadReport& report);
    void read_blocks(const File& file, const Run& piece, uint8_t* bounce, ReadReport& report);
    bool read_into(const File& file, const Run& part, int64_t most, ReadReport& report);
    void check_files(const Request& request, ReadReport& report) const;
    std::shared_ptr<Request> take(Run& piece);
    void finish(const std::shared_ptr<Request>& request, const ReadReport& report);
    void remove(const std::shared_ptr<Request>& request);
    std::deque<std::shared_ptr<Request>>& queue(bool urgent) { return urgent ? urgent_ : ahead_; }

    mutable std::mutex mutex_;
    std::condition_variable more_, ended_;
    std::deque<std::shared_ptr<Request>> urgent_, ahead_;
    std::unordered_map<uint64_t, std::shared_ptr<Request>> tickets_;
    std::vector<std::unique_ptr<File>> files_;
    std::vector<std::thread> threads_;
    ReadCounts counts_;
    uint64_t last_ = 0;
    bool stop_ = false;
};

}  // namespace moestro
