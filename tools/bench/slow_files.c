/* A slow file server, for LD_PRELOAD: calls on files below SLOW_FOLDER wait first, SLOW_OPEN_US to open one and
 * SLOW_PREAD_US to read from one at an offset, SLOW_STAT_US to ask for the state of one, in microseconds. The file CUT_SHORT loses its content once its length is
 * known and before its bytes are read, mapped or not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FILES 65536
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char slow[FILES]; /* whether a descriptor is of a file below SLOW_FOLDER */
static const char *folder;
static long open_us, pread_us, stat_us;

__attribute__((constructor)) static void settings(void) {
    const char *of_open = getenv("SLOW_OPEN_US"), *of_pread = getenv("SLOW_PREAD_US"), *of_stat = getenv("SLOW_STAT_US");
    folder = getenv("SLOW_FOLDER");
    open_us = of_open ? atol(of_open) : 0;
    pread_us = of_pread ? atol(of_pread) : 0;
    stat_us = of_stat ? atol(of_stat) : 0;
}

static void pause_us(long us) {
    struct timespec time = {us / 1000000, us % 1000000 * 1000};
    if (us) nanosleep(&time, NULL);
}

static int below(const char *path) { return folder && !strncmp(path, folder, strlen(folder)); }

static int opened(const char *path, int file) {
    if (file >= 0 && file < FILES) slow[file] = below(path);
    return file;
}

static void cut(int file) {
    const char *path = getenv("CUT_SHORT");
    struct stat wanted, found;
    if (path && !stat(path, &wanted) && !fstat(file, &found) && wanted.st_ino == found.st_ino && truncate(path, 0)) _exit(99);
}

#define OPEN(name)                                             \
    int name(const char *path, int flags, ...) {               \
        va_list more;                                          \
        va_start(more, flags);                                 \
        mode_t mode = va_arg(more, mode_t);                    \
        va_end(more);                                          \
        if (below(path)) pause_us(open_us);                    \
        return opened(path, REAL(name)(path, flags, mode));    \
    }
OPEN(open)
OPEN(open64)

FILE *fopen(const char *path, const char *mode) {
    if (below(path)) pause_us(open_us);
    FILE *stream = REAL(fopen)(path, mode);
    if (stream) opened(path, fileno(stream));
    return stream;
}

#define PREAD(name)                                                     \
    ssize_t name(int file, void *to, size_t count, off_t start) {       \
        if (file >= 0 && file < FILES && slow[file]) pause_us(pread_us); \
        return REAL(name)(file, to, count, start);                      \
    }
PREAD(pread)
PREAD(pread64)

#define STAT(name, kind)                          \
    int name(const char *path, struct kind *state) { \
        if (below(path)) pause_us(stat_us);          \
        return REAL(name)(path, state);              \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

void *mmap(void *at, size_t length, int access, int flags, int file, off_t start) {
    void *mapped = REAL(mmap)(at, length, access, flags, file, start);
    if (file >= 0) cut(file);
    return mapped;
}

size_t fread(void *to, size_t size, size_t count, FILE *stream) {
    cut(fileno(stream));
    return REAL(fread)(to, size, count, stream);
}
