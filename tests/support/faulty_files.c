/* A file server that is slow, short of breath, or wrong, for LD_PRELOAD. It concerns files below FAULT_FOLDER.
 *
 * FAULT_CALL: open, read, write, fsync, close, rename, mkdir or stat. From the call of number FAULT_AT on (1: the first),
 *   FAULT_COUNT of them (1) take FAULT_US and end with the error FAULT_ERRNO, if that is not 0. FAULT_LATE=1: they have
 *   happened, and only their answer is lost.
 * SHORT_READS: a read returns at most so many bytes.
 *
 * faulty_files_settings() reads the environment again, for a process that was forked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FILES 65536
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char faulty[FILES]; /* whether a descriptor is of a file below FAULT_FOLDER */
static const char *folder, *fault_call;
static long fault_at, fault_count, fault_us, fault_errno, fault_late, short_reads, calls;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text ? atol(text) : otherwise;
}

__attribute__((constructor)) void faulty_files_settings(void) {
    folder = getenv("FAULT_FOLDER");
    fault_call = getenv("FAULT_CALL");
    fault_at = number("FAULT_AT", 1), fault_count = number("FAULT_COUNT", 1), fault_us = number("FAULT_US", 0);
    fault_errno = number("FAULT_ERRNO", 0), fault_late = number("FAULT_LATE", 0);
    short_reads = number("SHORT_READS", 0), calls = 0;
}

static void pause_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    if (us) nanosleep(&time, NULL);
}

static int below(const char *path) { return folder && !strncmp(path, folder, strlen(folder)); }

static int opened(const char *path, int file) {
    if (file >= 0 && file < FILES) faulty[file] = below(path);
    return file;
}

/* Whether this call of `name`, on a file that is `concerned`, must fail. */
static int fails(const char *name, int concerned) {
    if (!concerned || !fault_call || strcmp(name, fault_call)) return 0;
    long call = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (call < fault_at || call >= fault_at + fault_count) return 0;
    pause_us(fault_us);
    return fault_errno != 0;
}

static int is_faulty(int file) { return file >= 0 && file < FILES && faulty[file]; }

/* Make `call`, unless it fails before; return `none` with the error where it fails. */
#define ANSWER(type, name, concerned, call, none)    \
    do {                                             \
        int failed = fails(name, concerned);         \
        type result = none;                          \
        if (!failed || fault_late) result = call;    \
        if (failed) errno = fault_errno, result = none; \
        return result;                               \
    } while (0)

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list more;                                          \
        va_start(more, flags);                                 \
        mode_t mode = va_arg(more, mode_t);                    \
        va_end(more);                                          \
        ANSWER(int, "open", below(path), opened(path, REAL(name)(path, flags, mode)), -1); \
    }
OPEN(open)
OPEN(open64)

FILE *fopen(const char *path, const char *mode) {
    if (fails("open", below(path))) return errno = fault_errno, NULL;
    FILE *stream = REAL(fopen)(path, mode);
    if (stream) opened(path, fileno(stream));
    return stream;
}

static size_t shortened(int file, size_t count) {
    return is_faulty(file) && short_reads && count > (size_t)short_reads ? (size_t)short_reads : count;
}

#define PREAD(name)                                                     \
    ssize_t name(int file, void *to, size_t count, off_t start) {       \
        ANSWER(ssize_t, "read", is_faulty(file), REAL(name)(file, to, shortened(file, count), start), -1); \
    }
PREAD(pread)
PREAD(pread64)

ssize_t read(int file, void *to, size_t count) {
    ANSWER(ssize_t, "read", is_faulty(file), REAL(read)(file, to, shortened(file, count)), -1);
}

ssize_t write(int file, const void *from, size_t count) {
    ANSWER(ssize_t, "write", is_faulty(file), REAL(write)(file, from, count), -1);
}

int fsync(int file) { ANSWER(int, "fsync", is_faulty(file), REAL(fsync)(file), -1); }

int close(int file) {
    int concerned = is_faulty(file);
    if (concerned) faulty[file] = 0;
    int answer = REAL(close)(file), failed = fails("close", concerned);
    return failed ? errno = fault_errno, -1 : answer;
}

int rename(const char *from, const char *to) { ANSWER(int, "rename", below(to), REAL(rename)(from, to), -1); }

int mkdir(const char *path, mode_t mode) { ANSWER(int, "mkdir", below(path), REAL(mkdir)(path, mode), -1); }

#define STAT(name, kind)                          \
    int name(const char *path, struct kind *state) { \
        ANSWER(int, "stat", below(path), REAL(name)(path, state), -1); \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
