#include "reads.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

// The driver of tests/native puts delays and failures in its place.
#if !defined(MOESTRO_PREAD)
#define MOESTRO_PREAD ::pread
#endif

namespace moestro {
namespace {

constexpr int64_t down(int64_t value) { return value & ~(kReadBlock - 1); }
constexpr int64_t up(int64_t value) { return down(value + kReadBlock - 1); }

struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
};
std::unique_ptr<uint8_t, Free> blocks(int64_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, kReadBlock, static_cast<size_t>(bytes))) throw std::bad_alloc();
    return std::unique_ptr<uint8_t, Free>(static_cast<uint8_t*>(memory));
}

FileIdentity identity_of(const struct stat& status) {
    FileIdentity found;
    found.device = status.st_dev, found.inode = status.st_ino, found.size = status.st_size;
#if defined(__APPLE__)
    const struct timespec& modified = status.st_mtimespec;
#else
    const struct timespec& modified = status.st_mtim;
#endif
    found.modified_ns = int64_t{modified.tv_sec} * 1000000000 + modified.tv_nsec;
    return found;
}

int open_file(const std::string& path, int flags) {
    while (true) {
        const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
        if (descriptor >= 0 || errno != EINTR) return descriptor;
    }
}

// A descriptor that reads past the system's cache, or -1 where the filesystem has none.
int open_direct(const std::string& path) {
#if defined(O_DIRECT)
    const int descriptor = open_file(path, O_DIRECT);
    if (descriptor < 0) return -1;
    const auto probe = blocks(kReadBlock);
    if (::pread(descriptor, probe.get(), kReadBlock, 0) >= 0) return descriptor;
    ::close(descriptor);
#else
    (void)path;
#endif
    return -1;
}

}  // namespace

Reads::Reads(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
}

Reads::~Reads() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    for (const auto& file : files_) ::close(file->descriptor);
}

int Reads::open(const std::string& path, const FileIdentity& identity, bool direct) {
    auto file = std::make_unique<File>();
    file->path = path, file->identity = identity;
    file->descriptor = direct ? open_direct(path) : -1;
    file->direct = file->descriptor >= 0;
    if (!file->direct) file->descriptor = open_file(path, 0);
    if (file->descriptor < 0) return -errno;
    const std::lock_guard<std::mutex> lock(mutex_);
    files_.push_back(std::move(file));
    return static_cast<int>(files_.size()) - 1;
}

bool Reads::is_direct(int file) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return files_[file]->direct;
}

int Reads::num_files() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int>(files_.size());
}

uint64_t Reads::submit(const std::vector<Run>& runs, bool urgent) {
    auto request = std::make_shared<Request>();
    request->runs = runs, request->urgent = urgent;
    int64_t bytes = 0;
    for (const Run& run : runs) {
        bytes += run.length;
        for (int64_t start = run.offset, last = run.offset + run.length; start < last;) {
            const int64_t stop = std::min((start / kReadPiece + 1) * kReadPiece, last);
            Run piece = run;
            piece.offset = start, piece.length = stop - start, piece.to = run.to + (start - run.offset);
            request->pieces.push_back(piece);
            start = stop;
        }
    }
    request->unfinished = request->pieces.size();
    uint64_t ticket;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        ticket = ++last_;
        tickets_[ticket] = request;
        counts_.requests += 1, counts_.bytes += bytes;
        request->ended = request->pieces.empty();
        if (!request->ended) queue(urgent).push_back(request);
    }
    more_.notify_all();
    return ticket;
}

void Reads::hurry(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end() || found->second->urgent) return;
    const std::shared_ptr<Request> request = found->second;
    const bool waits = request->next < request->pieces.size() && !request->ended;
    if (waits) remove(request);
    request->urgent = true;
    if (waits) urgent_.push_back(request);
}

bool Reads::drop(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end() || found->second->ended || found->second->next) return false;
    remove(found->second);
    counts_.dropped += 1;
    tickets_.erase(found);
    return true;
}

bool Reads::wait(uint64_t ticket, int64_t milliseconds, ReadReport& report) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto found = tickets_.find(ticket);
    if (found == tickets_.end()) {
        report.outcome = ReadOutcome::dropped;
        return true;
    }
    const std::shared_ptr<Request> request = found->second;
    if (!ended_.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] { return request->ended; })) return false;
    report = request->report;
    tickets_.erase(ticket);
    return true;
}

bool Reads::knows(uint64_t ticket) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return tickets_.count(ticket) != 0;
}

bool Reads::has_ended(uint64_t ticket) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tickets_.find(ticket);
    return found == tickets_.end() || found->second->ended;
}

ReadCounts Reads::counts() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counts_;
}

void Reads::remove(const std::shared_ptr<Request>& request) {
    auto& from = queue(request->urgent);
    from.erase(std::remove(from.begin(), from.end(), request), from.end());
}

void Reads::work() {
    const auto bounce = blocks(kBounceBytes);
    Run piece;
    while (const std::shared_ptr<Request> request = take(piece)) {
        ReadReport report;
        read_piece(piece, bounce.get(), report);
        finish(request, report);
    }
}

// The next piece and its request; null at the end.
std::shared_ptr<Reads::Request> Reads::take(Run& piece) {
    std::unique_lock<std::mutex> lock(mutex_);
    more_.wait(lock, [&] { return stop_ || !urgent_.empty() || !ahead_.empty(); });
    if (stop_) return nullptr;
    auto& from = urgent_.empty() ? ahead_ : urgent_;
    const std::shared_ptr<Request> request = from.front();
    piece = request->pieces[request->next++];
    if (request->next == request->pieces.size()) from.pop_front();
    return request;
}

// After a failure the pieces that nobody has begun are left out.
void Reads::finish(const std::shared_ptr<Request>& request, const ReadReport& report) {
    bool is_last;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (report.outcome != ReadOutcome::done && request->report.outcome == ReadOutcome::done) {
            request->report = report;
            if (request->next < request->pieces.size()) remove(request);
            request->unfinished -= request->pieces.size() - request->next;
            request->next = request->pieces.size();
        }
        is_last = --request->unfinished == 0;
    }
    if (!is_last) return;
    ReadReport checked = request->report;
    check_files(*request, checked);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        request->report = checked;
        request->ended = true;
    }
    ended_.notify_all();
}

// Whether the files that a request was read from are still what they were, and the paths still name them. Of a failure
// this is the better reason.
void Reads::check_files(const Request& request, ReadReport& report) const {
    std::vector<int> seen;
    for (const Run& run : request.runs) {
        if (std::find(seen.begin(), seen.end(), run.file) != seen.end()) continue;
        seen.push_back(run.file);
        const File* file;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            file = files_[run.file].get();
        }
        struct stat status;
        const bool is_there = ::stat(file->path.c_str(), &status) == 0;
        if (is_there && identity_of(status) == file->identity) continue;
        report.outcome = is_there ? ReadOutcome::changed : ReadOutcome::gone;
        report.file = run.file, report.offset = run.offset;
        return;
    }
}

void Reads::read_piece(const Run& piece, uint8_t* bounce, ReadReport& report) {
    const File* file;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        file = files_[piece.file].get();
    }
    if (!file->direct) {
        read_into(*file, piece, piece.length, report);
        return;
    }
    const int64_t last = piece.offset + piece.length;
    Run head = piece, middle = piece, tail = piece;
    const int64_t start = std::min(up(piece.offset), last), stop = std::max(down(last), start);
    const bool in_step = (reinterpret_cast<int64_t>(piece.to) - piece.offset) % kReadBlock == 0;
    if (!in_step || stop == start) return read_blocks(*file, piece, bounce, report);
    head.length = start - piece.offset;
    middle.offset = start, middle.length = stop - start, middle.to += head.length;
    tail.offset = stop, tail.length = last - stop, tail.to += stop - piece.offset;
    if (!read_into(*file, middle, middle.length, report)) return;
    if (head.length) read_blocks(*file, head, bounce, report);
    if (tail.length && report.outcome == ReadOutcome::done) read_blocks(*file, tail, bounce, report);
}

// Whole blocks by way of memory that lies as direct reads want it.
void Reads::read_blocks(const File& file, const Run& piece, uint8_t* bounce, ReadReport& report) {
    const int64_t last = piece.offset + piece.length;
    for (int64_t at = down(piece.offset); at < last; at += kBounceBytes) {
        const int64_t start = std::max(at, piece.offset), stop = std::min(at + kBounceBytes, last);
        Run block = piece;
        block.offset = at, block.length = stop - at, block.to = bounce;
        if (!read_into(file, block, up(block.length), report)) return;
        std::memcpy(piece.to + (start - piece.offset), bounce + (start - at), static_cast<size_t>(stop - start));
    }
}

// At least `part.length` bytes, and no more than `most`: the file may end between the two.
bool Reads::read_into(const File& file, const Run& part, int64_t most, ReadReport& report) {
    int64_t got = 0, calls = 0, bytes = 0;
    while (got < part.length && report.outcome == ReadOutcome::done) {
        const auto n = MOESTRO_PREAD(file.descriptor, part.to + got, static_cast<size_t>(most - got),
                                     static_cast<off_t>(part.offset + got));
        calls += 1, bytes += n > 0 ? n : 0;
        if (n < 0 && errno == EINTR) continue;
        const int64_t next = n < 0 ? got : got + n, whole = file.direct ? down(next) : next;
        if (n < 0) report.outcome = ReadOutcome::system_error, report.error = errno;
        else if (next < part.length && whole <= got) report.outcome = ReadOutcome::cut_off;
        report.file = part.file, report.offset = part.offset + got;
        got = next < part.length ? whole : next;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.system_calls += calls, counts_.bytes_from_files += bytes;
    return report.outcome == ReadOutcome::done;
}

}  // namespace moestro
