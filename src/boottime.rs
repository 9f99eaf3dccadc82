//! A clock that goes on while the machine is suspended.
//!
//! A laptop or a virtual machine that wakes up after an hour must find its leases expired. [`std::time::Instant`] stops
//! during suspend and would trust them for an hour longer than the database does.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Time since the machine started, suspend included.
pub(crate) fn now() -> Duration {
    #[cfg(target_os = "linux")]
    const CLOCK: ClockId = ClockId::Boottime;
    // Elsewhere this is the nearest there is; on macOS it goes on during sleep too.
    #[cfg(not(target_os = "linux"))]
    const CLOCK: ClockId = ClockId::Monotonic;
    let now = clock_gettime(CLOCK);
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u32::try_from(now.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}
