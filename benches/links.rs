//! Benchmark of links between nodes: 64 MiB in both directions at once between two processes on
//! loopback, MB/s per direction, medians of some rounds, in which the methods take turns.
//!
//!     cargo bench --bench links -- [--rounds N] [--threads N] [--payload KIB] [--mib N]
//!         [--delay MS] [--jitter MS] [--lost PERMILLE] [--rate MB/S]
//!
//! With a delay (one way), losses or a rate, a proxy of UDP is between the processes: the network
//! of a home.
//!
//!     dropped     a bare stream of quinn with the same TLS; what arrives is dropped
//!     copied      the same; what arrives is copied to one place, as a link must
//!     tuned       like copied, with the settings of links
//!     bbr         like tuned, with BBR as congestion control
//!     link        payloads on a link, which land in memory of the receiver
//!
//! The last columns are link / copied, link / tuned and bbr / tuned, round by round: the second one
//! is the part of the speed that the code of a link leaves.

#[path = "../tests/common/udp_proxy.rs"]
mod udp_proxy;

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use potluck_net::{
    CloseReason, Congestion, Endpoint, EndpointOptions, Link, Payload, ReceiveBuffer, Receiver,
    Secret, TAG_BYTES, bench,
};
use tokio::runtime::Runtime;
use udp_proxy::{UdpProxy, Weather};

const CHUNK: usize = 1 << 20;
const WAYS: [&str; 5] = ["dropped", "copied", "tuned", "bbr", "link"];
/// Settings of the bare endpoints: quinn's, and those of links.
const BARE: [Option<Congestion>; 3] = [None, Some(Congestion::Cubic), Some(Congestion::Bbr)];
const PATIENCE: Duration = Duration::from_secs(60);

fn main() {
    if argument("--peer", 0) == 1 {
        return peer();
    }
    let rounds = argument("--rounds", 7);
    let secret = Secret::generate().expect("random numbers");
    let (mut child, mut addresses) = start_peer(&secret);
    let mut proxies = Vec::new();
    if let Some(weather) = weather() {
        for address in &mut addresses {
            let proxy = UdpProxy::start(*address, weather);
            *address = proxy.address;
            proxies.push(proxy);
        }
    }
    let mut ways = Ways::connect(&secret, &addresses);
    let mut rates = [const { Vec::new() }; 5];
    // One round more, in which windows open and the size of datagrams is found.
    for _ in 0..=rounds {
        for (way, rates) in rates.iter_mut().enumerate() {
            let started = Instant::now();
            ways.exchange(way);
            rates.push(bytes() as f64 / started.elapsed().as_secs_f64() * 1e-6);
        }
    }
    let ratio = |ways: &[f64], bare: &[f64]| {
        let ratios = ways.iter().zip(bare).skip(1).map(|(way, bare)| way / bare);
        median(&mut ratios.collect::<Vec<_>>())
    };
    let [_, copied, tuned, bbr, link] = &rates;
    let ratios = [ratio(link, copied), ratio(link, tuned), ratio(bbr, tuned)];
    let names = WAYS.into_iter().chain(["/copied", "/tuned", "bbr/tuned"]);
    println!("{}", names.map(|name| format!("{name:>10}")).collect::<String>());
    let cells = rates.map(|mut rates| format!("{:10.1}", median(&mut rates[1..])));
    println!("{}{}", cells.concat(), ratios.map(|ratio| format!("{ratio:10.2}")).concat());
    drop(ways);
    drop(child.stdin.take());
    child.wait().expect("the peer ends");
}

fn argument(name: &str, default: usize) -> usize {
    let arguments: Vec<String> = std::env::args().collect();
    let at = arguments.iter().position(|argument| argument == name);
    at.and_then(|at| arguments.get(at + 1)).map_or(default, |n| n.parse().expect("a number"))
}

/// Bytes of a round, in each direction.
fn bytes() -> usize {
    argument("--mib", 64) << 20
}

/// Treatment of packets between the processes; `None` for loopback as it is.
fn weather() -> Option<Weather> {
    let millis = |name| Duration::from_millis(argument(name, 0) as u64);
    let weather = Weather {
        seed: 1,
        delay: millis("--delay"),
        jitter: millis("--jitter"),
        lost: argument("--lost", 0) as u32,
        doubled: 0,
        bytes_per_s: argument("--rate", 0) as u64 * 1_000_000,
    };
    let on_time = weather.delay.is_zero() && weather.jitter.is_zero();
    let is_plain = on_time && weather.lost == 0 && weather.bytes_per_s == 0;
    if is_plain { None } else { Some(weather) }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

fn options() -> EndpointOptions {
    EndpointOptions { threads: argument("--threads", 2), ..EndpointOptions::new(any_port()) }
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(argument("--threads", 2))
        .enable_all()
        .build()
        .expect("threads")
}

/// Starts this program as the other process, which gets the secret on its standard input, and
/// returns it with its addresses.
fn start_peer(secret: &Secret) -> (Child, Vec<SocketAddr>) {
    let mut child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--peer", "1"])
        .args(std::env::args().skip(1).filter(|argument| argument != "--bench"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the peer starts");
    let code = secret.code().expect("a generated secret has a code");
    writeln!(child.stdin.as_mut().expect("a pipe"), "{code}").expect("the peer reads");
    let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let addresses =
        lines.take(1 + BARE.len()).map(|line| line.expect("text").parse().expect("an address"));
    let addresses = addresses.collect();
    (child, addresses)
}

/// Runs the other process until its standard input ends.
fn peer() {
    let mut lines = std::io::stdin().lines();
    let code = lines.next().expect("a code").expect("text");
    let secret = Secret::parse(&code).expect("the code of the parent");
    let runtime = runtime();
    for settings in BARE {
        let _context = runtime.enter();
        let bare = bench::bare_endpoint(&secret, any_port(), settings).expect("a socket");
        println!("{}", bare.local_addr().expect("it is bound"));
        runtime.spawn(serve_bare(bare));
    }
    let endpoint = Endpoint::bind(options(), &secret, b"").expect("a socket");
    println!("{}", endpoint.local_addr());
    let pending = endpoint.accepted().recv(None).expect("the parent dials");
    let counter = Arc::new(Counter::default());
    let link = pending.open(counter.clone());
    // A control message asks for a round; the last one is the end of the input.
    std::thread::spawn(move || {
        for round in 1.. {
            counter.wait(|count| count.controls >= round);
            send_payloads(&link);
            counter.wait(|count| count.bytes >= round * bytes());
            if link.send_control(vec![]).is_err() {
                return;
            }
        }
    });
    lines.for_each(drop);
}

/// Answers each stream with as many bytes as it brings, at the same time, and one more when all
/// have come.
async fn serve_bare(endpoint: quinn::Endpoint) {
    while let Some(incoming) = endpoint.accept().await {
        let Ok(connection) = incoming.await else { continue };
        tokio::spawn(async move {
            while let Ok((mut send, receive)) = connection.accept_bi().await {
                let reading = tokio::spawn(read(receive, true));
                write(&mut send).await;
                reading.await.expect("it reads");
                send.write_all(&[1]).await.expect("the parent reads");
                send.finish().expect("it was open");
            }
        });
    }
}

async fn write(stream: &mut quinn::SendStream) {
    let chunk = bytes::Bytes::from(vec![1u8; CHUNK]);
    for _ in 0..bytes() / CHUNK {
        stream.write_chunk(chunk.clone()).await.expect("it is open");
    }
}

/// Reads a stream to its end, or the bytes of a round.
async fn read(mut stream: quinn::RecvStream, copies: bool) {
    let (mut place, mut count) = (vec![0; CHUNK], 0);
    loop {
        let read = if copies {
            stream.read(&mut place[count % CHUNK..]).await.expect("it is open")
        } else {
            let chunk = stream.read_chunk(usize::MAX, true).await.expect("it is open");
            chunk.map(|chunk| chunk.bytes.len())
        };
        let Some(bytes) = read else { return };
        count += bytes;
    }
}

/// Connections of the parent.
struct Ways {
    runtime: Runtime,
    /// By [`BARE`].
    bare: [quinn::Connection; 3],
    link: Link,
    counter: Arc<Counter>,
    rounds: usize,
    _endpoint: Endpoint,
}

impl Ways {
    fn connect(secret: &Secret, addresses: &[SocketAddr]) -> Self {
        let runtime = runtime();
        let connect = |number: usize| {
            runtime.block_on(async {
                let bare = bench::bare_endpoint(secret, any_port(), BARE[number]);
                let bare = bare.expect("a socket");
                let connecting = bare.connect(addresses[number], bench::NODE_NAME);
                connecting.expect("an address").await.expect("it is the other process")
            })
        };
        let bare = [0, 1, 2].map(connect);
        let endpoint = Endpoint::bind(options(), secret, b"").expect("a socket");
        let counter = Arc::new(Counter::default());
        let pending = endpoint.dial(addresses[3], PATIENCE).expect("it is the other process");
        let link = pending.open(counter.clone());
        Self { runtime, bare, link, counter, rounds: 0, _endpoint: endpoint }
    }

    /// Sends and receives the bytes of a round.
    fn exchange(&mut self, way: usize) {
        match way {
            0 => self.runtime.block_on(exchange_bare(&self.bare[0], false)),
            1..=3 => self.runtime.block_on(exchange_bare(&self.bare[way - 1], true)),
            _ => {
                self.rounds += 1;
                let rounds = self.rounds;
                self.link.send_control(vec![]).expect("it is open");
                send_payloads(&self.link);
                self.counter
                    .wait(|count| count.bytes >= rounds * bytes() && count.controls >= rounds);
            }
        }
    }
}

async fn exchange_bare(connection: &quinn::Connection, copies: bool) {
    let (mut send, receive) = connection.open_bi().await.expect("it is open");
    let reading = tokio::spawn(read(receive, copies));
    write(&mut send).await;
    send.finish().expect("it is open");
    reading.await.expect("it reads");
}

fn send_payloads(link: &Link) {
    let payload_bytes = argument("--payload", 1024) << 10;
    let payload = Payload::from(vec![1; payload_bytes]);
    for _ in 0..bytes() / payload_bytes {
        if link.send_data([7; TAG_BYTES], payload.clone()).is_err() {
            return;
        }
    }
}

/// What has arrived on a link.
#[derive(Default)]
struct Count {
    bytes: usize,
    controls: usize,
    places: Vec<Vec<u8>>,
}

#[derive(Default)]
struct Shared {
    count: Mutex<Count>,
    changed: Condvar,
}

/// Receiver that counts, and lets payloads land in buffers that are used again.
#[derive(Default)]
struct Counter(Arc<Shared>);

impl Counter {
    fn wait(&self, mut done: impl FnMut(&Count) -> bool) {
        let count = self.0.count.lock().expect("nothing panics");
        let waited = self.0.changed.wait_timeout_while(count, PATIENCE, |count| !done(count));
        assert!(!waited.expect("nothing panics").1.timed_out(), "nothing arrives");
    }

    fn change(&self, change: impl FnOnce(&mut Count)) -> Result<(), String> {
        change(&mut self.0.count.lock().expect("nothing panics"));
        self.0.changed.notify_all();
        Ok(())
    }
}

struct Region(Counter, Vec<u8>);

impl ReceiveBuffer for Region {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.1
    }

    fn arrived(self: Box<Self>) -> Result<(), String> {
        let Self(counter, place) = *self;
        counter.change(|count| {
            count.bytes += place.len();
            count.places.push(place);
        })
    }
}

impl Receiver for Counter {
    fn control(&self, _: Vec<u8>) -> Result<(), String> {
        self.change(|count| count.controls += 1)
    }

    fn blob_begins(&self, _: u64, _: usize) -> Result<(), String> {
        Err("no blob is due".into())
    }

    fn blob(&self, _: u64, _: Vec<u8>) -> Result<(), String> {
        Err("no blob is due".into())
    }

    fn data(&self, _: &[u8; TAG_BYTES], bytes: usize) -> Result<Box<dyn ReceiveBuffer>, String> {
        let place = self.0.count.lock().expect("nothing panics").places.pop();
        let place = place.unwrap_or_else(|| vec![0; bytes]);
        Ok(Box::new(Region(Self(self.0.clone()), place)))
    }

    fn closed(&self, why: &CloseReason) {
        if !matches!(why, CloseReason::Peer(_) | CloseReason::Here(_)) {
            eprintln!("{why}");
        }
    }
}
