// The compute threads: one job at a time, a list of loops whose tasks the threads share.
//
// Threads sleep between jobs and spin between the loops of a job. On a machine with few cores the event loop's thread takes
// one of them away at any moment, so nobody is waited for who holds no task: tasks are handed out one by one, a loop is over
// when its tasks are, and a thread that was away passes over what the others have done meanwhile. Between loops, where it
// holds no task, each thread offers its core to whoever has been waiting for one.
//
// POSIX threads and no <thread>, <chrono>, <functional>: every unit includes this file, and those headers would double
// the time in which most of them compile at first start.
#pragma once
#include <pthread.h>
#include <sched.h>
#include <time.h>
#include <atomic>
#include <vector>
#include "simd.h"

namespace octavo {

// Counts its rings; threads sleep until there is one they have not seen.
class Bell {
  public:
    uint32_t rings() const { return rings_.load(std::memory_order_acquire); }
    void ring() {
        pthread_mutex_lock(&lock_);
        rings_.fetch_add(1, std::memory_order_release);
        pthread_mutex_unlock(&lock_);
        pthread_cond_broadcast(&rung_);
    }
    uint32_t wait(uint32_t seen) {
        if (rings() == seen) {
            pthread_mutex_lock(&lock_);
            while (rings() == seen) pthread_cond_wait(&rung_, &lock_);
            pthread_mutex_unlock(&lock_);
        }
        return rings();
    }

  private:
    pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t rung_ = PTHREAD_COND_INITIALIZER;
    std::atomic<uint32_t> rings_{0};
};

class Pool {
  public:
    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
        pthread_t thread;
        while ((int)workers_.size() < threads_ - 1 && !pthread_create(&thread, nullptr, &Pool::serve, this)) workers_.push_back(thread);
    }
    ~Pool() {
        stopping_ = true;
        jobs_.ring();
        for (pthread_t thread : workers_) pthread_join(thread, nullptr);
    }
    int threads() const { return threads_; }

    // Run `job(thread)` on every thread that comes; returns when all loops are done and nobody is inside. One caller at a time.
    template <class F>
    void run(const F& job) {
        job_ = &job;
        call_ = [](const void* job, int thread) { (*(const F*)job)(thread); };
        current_ = first_ = (uint32_t)(state_.load(std::memory_order_relaxed) >> 32);
        offered_ = now();
        if (threads_ > 1) {
            inside_.store(OPEN, std::memory_order_release);
            jobs_.ring();
        }
        job(0);
        if (threads_ == 1) return;
        inside_.fetch_sub(OPEN, std::memory_order_acq_rel);
        wait([&] { return inside_.load(std::memory_order_acquire) == 0; });
    }

    // Inside a job: call body(i) for each i in [0, n), `grain` of them at a time, and wait until all are done.
    // Every thread of the job must reach it with the same n.
    template <class F>
    INLINE void loop(int n, int grain, const F& body) {
        if (threads_ == 1) {
            for (int i = 0; i < n; i++) body(i);
            return;
        }
        if (n <= 0) return;
        offer();
        const uint32_t mine = current_++;
        int own = 0;  // tasks done here
        for (uint64_t state = state_.load(std::memory_order_acquire); (uint32_t)(state >> 32) == mine;) {
            const int first = (int)(uint32_t)state;
            if (first >= n) {
                if (own && done_.fetch_add(own, std::memory_order_acq_rel) + own == n) {
                    done_.store(0, std::memory_order_relaxed);
                    state_.store((uint64_t)(mine + 1) << 32, std::memory_order_release);
                } else {
                    wait([&] { return (uint32_t)(state_.load(std::memory_order_acquire) >> 32) != mine; });
                }
                return;
            }
            if (!state_.compare_exchange_weak(state, state + grain, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
            const int end = first + grain < n ? first + grain : n;
            for (int i = first; i < end; i++) body(i);
            own += end - first;
            state = state_.load(std::memory_order_acquire);
        }
    }

  private:
    static constexpr int OPEN = 1 << 30;  // of `inside_`: a job may be entered

    template <class F>
    static INLINE void wait(const F& over) {
        for (int spins = 0; !over();)
            if (++spins < 300) pause(); else sched_yield();
    }
    static INLINE void offer() {
        if (now() - offered_ < 100'000) return;
        sched_yield();
        offered_ = now();
    }
    static int64_t now() {  // in nanoseconds
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
    }
    static void* serve(void* pool) {
        ((Pool*)pool)->serve();
        return nullptr;
    }
    void serve() {
        const int thread = 1 + joined_.fetch_add(1, std::memory_order_relaxed);
        for (uint32_t seen = 0;;) {
            for (int spins = 0; jobs_.rings() == seen && spins < 500; spins++) pause();
            seen = jobs_.wait(seen);
            if (stopping_) return;
            // A thread that wakes late finds the job closed and stays out.
            int inside = inside_.load(std::memory_order_acquire);
            while (inside >= OPEN && !inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel, std::memory_order_acquire)) {}
            if (inside < OPEN) continue;
            current_ = first_;
            offered_ = now();
            call_(job_, thread);
            inside_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }
    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#endif
    }

    const int threads_;
    std::vector<pthread_t> workers_;
    std::atomic<int> joined_{0};  // of the workers: gives each its number
    const void* job_ = nullptr;
    void (*call_)(const void* job, int thread) = nullptr;
    uint32_t first_ = 0;  // the job's first loop
    std::atomic<bool> stopping_{false};
    alignas(64) Bell jobs_;
    alignas(64) std::atomic<int> inside_{0};      // workers in the job, and OPEN
    alignas(64) std::atomic<uint64_t> state_{0};  // the loop that is under way, and above its lower 32 bits how many were: number << 32 | next task
    alignas(64) std::atomic<int> done_{0};        // its tasks that are
    static inline thread_local uint32_t current_; // the loop this thread is at
    static inline thread_local int64_t offered_;  // when this thread last let others have its core
};

// Who shares the loops of an operation: all threads of a job, or the calling thread alone, which then waits for nobody.
struct Team {
    Pool* pool;
    template <class F>
    INLINE void loop(int n, int grain, const F& body) const {
        if (pool) return pool->loop(n, grain, body);
        for (int i = 0; i < n; i++) body(i);
    }
};

}  // namespace octavo
