//! UDP proxy in the test's process between nodes and the node that they dial: it delays, reorders,
//! loses and doubles datagrams, bounds their rate, and cuts one or both directions.
#![allow(dead_code, reason = "each test binary uses a part of this file")]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use potluck_core::rng::Key;

/// Time after which a thread without a datagram looks whether the proxy has ended.
const LOOK: Duration = Duration::from_millis(20);
/// Longest queue of a rate limit; what would wait for longer is lost, as in a router.
const QUEUE_MAX: Duration = Duration::from_millis(200);
const NONE: Duration = Duration::ZERO;

/// Treatment of datagrams. Decisions on the datagrams of a direction follow from the seed and
/// their number alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Weather {
    pub seed: u64,
    /// Time on the way, in each direction, and most time in addition, by which datagrams overtake
    /// each other.
    pub delay: Duration,
    pub jitter: Duration,
    /// Datagrams of 1000 that are lost, and that come twice.
    pub lost: u32,
    pub doubled: u32,
    /// Bytes per second in each direction; 0 is without a limit.
    pub bytes_per_s: u64,
}

/// Direction of datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// To the node that is dialed.
    There,
    Back,
}

/// Counts of datagrams, over both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub sent: u64,
    pub lost: u64,
    pub doubled: u64,
    /// Sent before one that had come earlier.
    pub overtaking: u64,
}

/// Proxy; dropped, it ends.
pub struct UdpProxy {
    /// Address to dial instead of that of the node.
    pub address: SocketAddr,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    weather: Weather,
    is_cut: [AtomicBool; 2],
    is_clear: AtomicBool,
    is_over: AtomicBool,
    /// Datagrams that have come, by direction.
    numbers: [AtomicU32; 2],
    /// Time until which a direction is busy, with a rate limit.
    busy_until: [Mutex<Option<Instant>>; 2],
    queue: Mutex<BinaryHeap<Reverse<(Instant, u64, Departure)>>>,
    changed: Condvar,
    counts: [AtomicU64; 4],
}

/// Datagram on its way. The order among those of one time is that of their numbers, before it.
struct Departure {
    way: Way,
    socket: Arc<UdpSocket>,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl PartialEq for Departure {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Departure {}

impl PartialOrd for Departure {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Departure {
    fn cmp(&self, _: &Self) -> std::cmp::Ordering {
        std::cmp::Ordering::Equal
    }
}

impl UdpProxy {
    /// Starts a proxy on any port of loopback before the node at this address.
    pub fn start(node: SocketAddr, weather: Weather) -> Self {
        let front = UdpSocket::bind("127.0.0.1:0").unwrap();
        Self::between(front, "127.0.0.1", node, weather)
    }

    /// Starts a proxy that listens on a socket, and that the node sees at a loopback address.
    pub fn between(front: UdpSocket, seen_at: &str, node: SocketAddr, weather: Weather) -> Self {
        let shared = Arc::new(Shared {
            weather,
            is_cut: Default::default(),
            is_clear: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            numbers: Default::default(),
            busy_until: Default::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
            counts: Default::default(),
        });
        let address = front.local_addr().unwrap();
        let (sending, forwarding, seen_at) = (shared.clone(), shared.clone(), seen_at.to_string());
        let threads = vec![
            thread::spawn(move || sending.send_all()),
            thread::spawn(move || forwarding.forward(&Arc::new(front), &seen_at, node)),
        ];
        Self { address, shared, threads }
    }

    /// Cuts directions, or mends them.
    pub fn cut(&self, ways: &[Way], is_cut: bool) {
        for way in ways {
            self.shared.is_cut[*way as usize].store(is_cut, Ordering::SeqCst);
        }
    }

    /// Ends the delays: what comes from now on goes on at once.
    pub fn clear(&self) {
        self.shared.is_clear.store(true, Ordering::SeqCst);
    }

    pub fn counts(&self) -> Counts {
        let [sent, lost, doubled, overtaking] =
            [0, 1, 2, 3].map(|index: usize| self.shared.counts[index].load(Ordering::Relaxed));
        Counts { sent, lost, doubled, overtaking }
    }
}

impl Drop for UdpProxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn count(&self, which: usize) {
        self.counts[which].fetch_add(1, Ordering::Relaxed);
    }

    /// Takes the datagrams of all clients; each has a socket of its own towards the node.
    fn forward(self: &Arc<Self>, front: &Arc<UdpSocket>, seen_at: &str, node: SocketAddr) {
        let mut clients: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
        let mut threads = Vec::new();
        let mut datagram = vec![0; 1 << 16];
        front.set_read_timeout(Some(LOOK)).unwrap();
        while !self.is_over() {
            // Errors are timeouts, and reports that a client has gone.
            let Ok((bytes, client)) = front.recv_from(&mut datagram) else { continue };
            let back = clients.entry(client).or_insert_with(|| {
                let back = Arc::new(UdpSocket::bind((seen_at, 0)).unwrap());
                back.set_read_timeout(Some(LOOK)).unwrap();
                let (shared, front, from) = (self.clone(), front.clone(), back.clone());
                threads.push(thread::spawn(move || shared.answer(&from, &front, client)));
                back
            });
            self.schedule(Way::There, back, node, &datagram[..bytes]);
        }
        for thread in threads {
            thread.join().unwrap();
        }
    }

    /// Takes the answers of the node to one client.
    fn answer(&self, back: &UdpSocket, front: &Arc<UdpSocket>, client: SocketAddr) {
        let mut datagram = vec![0; 1 << 16];
        while !self.is_over() {
            let Ok((bytes, _)) = back.recv_from(&mut datagram) else { continue };
            self.schedule(Way::Back, front, client, &datagram[..bytes]);
        }
    }

    fn schedule(&self, way: Way, socket: &Arc<UdpSocket>, to: SocketAddr, bytes: &[u8]) {
        let number = self.numbers[way as usize].fetch_add(1, Ordering::Relaxed);
        let draw = |counter: u32| {
            let [word, _] = Key::new(self.weather.seed).words([number, 8 * way as u32 + counter]);
            word
        };
        let Some(queued) = self.queued(way, bytes.len()) else { return self.count(1) };
        if draw(0) % 1000 < self.weather.lost {
            return self.count(1);
        }
        let copies = 1 + u64::from(draw(1) % 1000 < self.weather.doubled);
        (1..copies).for_each(|_| self.count(2));
        let mut queue = self.queue.lock().unwrap();
        for copy in 0..copies {
            let part = f64::from(draw(2 + copy as u32)) / f64::from(u32::MAX);
            let most = self.weather.delay + self.weather.jitter.mul_f64(part);
            let due = queued + if self.is_clear.load(Ordering::SeqCst) { NONE } else { most };
            if queue.iter().any(|Reverse((at, ..))| *at > due) {
                self.count(3);
            }
            let departure = Departure { way, socket: socket.clone(), to, bytes: bytes.to_vec() };
            queue.push(Reverse((due, 2 * u64::from(number) + copy, departure)));
        }
        drop(queue);
        self.changed.notify_all();
    }

    /// Returns the time at which the rate limit lets a datagram go, or none if it is lost.
    fn queued(&self, way: Way, bytes: usize) -> Option<Instant> {
        let now = Instant::now();
        if self.weather.bytes_per_s == 0 {
            return Some(now);
        }
        let mut busy_until = self.busy_until[way as usize].lock().unwrap();
        let begins = busy_until.unwrap_or(now).max(now);
        if begins - now > QUEUE_MAX {
            return None;
        }
        let takes = Duration::from_secs_f64(bytes as f64 / self.weather.bytes_per_s as f64);
        *busy_until = Some(begins + takes);
        Some(begins + takes)
    }

    /// Sends the datagrams that are due.
    fn send_all(&self) {
        let mut queue = self.queue.lock().unwrap();
        while !self.is_over() {
            let now = Instant::now();
            let wait = match queue.peek() {
                Some(Reverse((due, ..))) if *due <= now => Duration::ZERO,
                Some(Reverse((due, ..))) => (*due - now).min(LOOK),
                None => LOOK,
            };
            if !wait.is_zero() {
                queue = self.changed.wait_timeout(queue, wait).unwrap().0;
                continue;
            }
            let Some(Reverse((_, _, departure))) = queue.pop() else { continue };
            drop(queue);
            if !self.is_cut[departure.way as usize].load(Ordering::SeqCst) {
                self.count(0);
                // A client that has gone needs no answer.
                let _ = departure.socket.send_to(&departure.bytes, departure.to);
            }
            queue = self.queue.lock().unwrap();
        }
    }
}
