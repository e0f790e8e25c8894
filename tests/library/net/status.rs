//! The server of the state of a run, over loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::any_port;
use crate::exposition::{parse, values};
use crate::http::{connect, get, get_with, send};
use potluck_core::metrics::{Event, RankRecord, StepRecord, Unit};
use potluck_core::{Generation, NodeRank};
use potluck_net::LinkStats;
use potluck_net::nodes::{LinkBoard, LinkStatus, LinksStatus};
use potluck_net::status::{
    Patience, RunAbout, RunPhase, RunStatus, StatusBoard, StatusError, StatusNode, StatusNodes,
    StatusServer, StatusToken,
};

/// Name with everything that a label has to escape.
const ODD_NAME: &str = "a \"card\" \\ of\ntwo lines, é";

fn board() -> Arc<StatusBoard> {
    let patience = Patience { node: Duration::from_millis(500), device: Duration::from_secs(9) };
    let about = RunAbout { name: Some("first".into()), version: "1.2.3", ..RunAbout::default() };
    Arc::new(StatusBoard::new(RunStatus::new(about, patience, true)))
}

fn take(board: &StatusBoard, event: &Event) {
    board.update(|status| status.take(event, Instant::now()));
}

fn step(step: u64, loss: f64) -> Event {
    let rank = |name: &str, waited| RankRecord {
        name: name.into(),
        share: 2,
        time: Duration::from_millis(250),
        waited: Duration::from_millis(waited),
        idle: 0.0,
        stage: None,
    };
    Event::Step(StepRecord {
        step,
        loss,
        terms: Vec::new(),
        lr: 1e-3,
        grad_norm: f64::INFINITY,
        loss_scale: Some(0.5),
        unit: Unit::Samples,
        count: 4,
        ms: 250.0,
        per_s: 16.0,
        busy: None,
        ranks: vec![rank(ODD_NAME, 0), rank("cpu", 125)],
        skipped: loss.is_nan().then(|| "a value is not finite".into()),
    })
}

/// Shows a run of two nodes in which two steps are done, one of them skipped.
fn show_run(board: &StatusBoard) {
    let node = |node, host: &str| {
        let devices = vec![ODD_NAME.into()];
        StatusNode { node: NodeRank(node), host: host.into(), devices }
    };
    let nodes = StatusNodes {
        you: Some(NodeRank(0)),
        generation: Generation(3),
        nodes: vec![node(0, "desk"), node(1, "attic")],
    };
    board.update(|status| status.nodes = Arc::new(nodes));
    let links = LinkBoard::default();
    let stats = LinkStats {
        round_trip: Duration::from_micros(250),
        bytes_sent: 1000,
        packets_sent: 10,
        packets_lost: 2,
        congestion_events: 1,
        congestion_window: 4096,
        ..LinkStats::default()
    };
    let link = LinkStatus {
        node: NodeRank(1),
        host: "attic".into(),
        address: SocketAddr::from(([127, 0, 0, 1], 7717)),
        stats,
        bytes_sent_per_s: 12.5,
        bytes_received_per_s: 0.0,
        heard: Some(Instant::now()),
    };
    links.store(Arc::new(LinksStatus { links: vec![link], refused: 5, ..LinksStatus::default() }));
    board.set_links(links);
    take(board, &Event::Started { done: 4, steps: 9, device: "cpu".into() });
    take(board, &step(5, f64::NAN));
    take(board, &step(6, f64::NAN));
}

#[test]
fn run_is_shown_in_three_forms() {
    let board = board();
    let server = StatusServer::start(any_port(), None, board.clone()).unwrap();
    let address = server.address();
    let opening = get(address, "/healthz");
    assert_eq!((opening.code, &*opening.body), (200, "waiting for the nodes of the run\n"));
    parse(&get(address, "/metrics").body).unwrap();
    show_run(&board);
    let training = get(address, "/healthz");
    assert_eq!(training.code, 200, "{training:?}");
    assert!(training.body.starts_with("training: step 6 of 9, "), "{training:?}");
    let metrics = get(address, "/metrics");
    assert!(metrics.head.contains("content-type: text/plain; version=0.0.4"), "{metrics:?}");
    let found = values(&metrics.body);
    for (name, value) in [
        ("build_info 1.2.3", 1.0),
        ("run_info first", 1.0),
        ("node_info 1", 1.0),
        ("healthy", 1.0),
        ("phase training", 1.0),
        ("phase opening", 0.0),
        ("step", 6.0),
        ("planned_steps", 9.0),
        ("steps_total", 2.0),
        ("skipped_steps_total", 2.0),
        ("samples_total", 8.0),
        ("samples_per_second", 16.0),
        ("learning_rate", 1e-3),
        ("gradient_norm", f64::INFINITY),
        ("checkpoint_step", 4.0),
        ("rank_busy_seconds_total 0", 0.5),
        ("rank_busy_seconds_total 1", 0.25),
        ("rank_waiting_seconds_total 1", 0.25),
        ("rank_share_samples 1", 2.0),
        ("refused_peers_total", 5.0),
        ("link_sent_bytes_total 1", 1000.0),
        ("link_sent_bytes_per_second 1", 12.5),
        ("link_round_trip_seconds 1", 250e-6),
        ("link_lost_packets_total 1", 2.0),
        ("link_congestion_events_total 1", 1.0),
        ("link_congestion_window_bytes 1", 4096.0),
    ] {
        assert_eq!(found.get(&format!("potluck_{name}")), Some(&value), "{name}");
    }
    assert!(found["potluck_loss"].is_nan());
    assert!(found["potluck_link_heartbeat_age_seconds 1"] < 60.0);
    let samples = parse(&metrics.body).unwrap();
    let device = ("device".to_string(), ODD_NAME.to_string());
    assert!(samples.iter().any(|sample| sample.labels.contains(&device)));
    let status: serde_json::Value = serde_json::from_str(&get(address, "/status").body).unwrap();
    assert_eq!(status["run"]["name"], "first");
    assert_eq!((&status["generation"], &status["node"]), (&3.into(), &0.into()));
    assert_eq!(status["nodes"][1]["host"], "attic");
    assert_eq!(status["ranks"][0]["device"], ODD_NAME);
    assert_eq!(status["last_checkpoint"]["step"], 4);
    assert_eq!(status["links"][0]["packets_lost"], 2);
    assert_eq!(status["last_step"]["loss"], serde_json::Value::Null);
    // No step has come for longer than the half second of the node and ten times the slowest step.
    let limit = status["health"]["limit_s"].as_f64().unwrap();
    std::thread::sleep(Duration::from_secs_f64(limit + 0.1));
    let late = get(address, "/healthz");
    assert_eq!(late.code, 503);
    assert!(late.body.starts_with("no progress for "), "{late:?}");
    assert_eq!(values(&get(address, "/metrics").body)["potluck_healthy"], 0.0);
    board.update(|status| status.phase = RunPhase::Over);
    assert_eq!(get(address, "/healthz").code, 200);
    drop(server);
    assert!(std::net::TcpStream::connect(address).is_err(), "it listens after its end");
}

#[test]
fn requests_of_others_are_refused() {
    let server = StatusServer::start(any_port(), None, board()).unwrap();
    let address = server.address();
    for path in ["/", "/healthz/", "/metrics2", "/../etc/passwd"] {
        assert_eq!(get(address, path).code, 404, "{path}");
    }
    assert_eq!(get(address, "/healthz?verbose").code, 200);
    let ask = |text: &str| send(address, text.as_bytes());
    let head = ask("HEAD /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert_eq!((head.code, &*head.body), (200, ""));
    let post = ask("POST /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody");
    let post = post.unwrap();
    assert!(post.code == 405 && post.head.contains("allow: get, head"), "{post:?}");
    let page = ask("GET /status HTTP/1.1\r\nHost: rebound.example.com\r\n\r\n").unwrap();
    assert_eq!(page.code, 403);
    let long =
        format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(99_999));
    let many = format!("GET /healthz HTTP/1.1\r\n{}\r\n", "X: x\r\n".repeat(100));
    for large in [long, many] {
        assert!(ask(&large).is_none_or(|answer| answer.code == 431));
    }
    for wrong in ["nonsense\r\n\r\n", "GET /healthz HTTP/3.0\r\n\r\n", "\0\0\0\0\r\n\r\n"] {
        assert!(ask(wrong).is_none_or(|answer| answer.code == 400), "{wrong:?}");
    }
    assert_eq!(get(address, "/healthz").code, 200);
}

#[test]
fn machines_of_others_need_a_token() {
    let everywhere = SocketAddr::from(([0, 0, 0, 0], 0));
    let error = StatusServer::start(everywhere, None, board()).err().unwrap();
    assert!(matches!(error, StatusError::NoToken(_)));
    let expected = "0.0.0.0:0 can be reached from other machines, and whoever asks there must have";
    assert!(error.to_string().starts_with(expected), "{error}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "0123456789abcdef\n").unwrap();
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let token = Some(StatusToken::read_file(&path).unwrap());
    let server = StatusServer::start(everywhere, token, board()).unwrap();
    let address = SocketAddr::from(([127, 0, 0, 1], server.address().port()));
    for path in ["/healthz", "/metrics", "/status", "/"] {
        for lines in
            ["", "Authorization: Bearer 0123456789abcdeF\r\n", "Authorization: Basic eA==\r\n"]
        {
            let refused = get_with(address, path, lines);
            assert_eq!(refused.code, 401, "{path} {lines}");
            assert!(refused.head.contains("www-authenticate: bearer"), "{refused:?}");
            assert!(!refused.body.contains("0123456789abcdef"));
        }
    }
    let lines = "Authorization: Bearer 0123456789abcdef\r\n";
    assert_eq!(get_with(address, "/healthz", lines).code, 200);
}

#[test]
fn connections_held_open_block_nobody() {
    let server = StatusServer::start(any_port(), None, board()).unwrap();
    let address = server.address();
    let mut held = Vec::new();
    for number in 0..300 {
        let mut stream = connect(address);
        if number % 2 == 0 {
            std::io::Write::write_all(&mut stream, b"GET /healthz HT").unwrap();
        }
        held.push(stream);
        if number % 50 == 0 {
            assert_eq!(get(address, "/healthz").code, 200);
        }
    }
    let started = Instant::now();
    assert_eq!(get(address, "/healthz").code, 200);
    // All that are held wait in the queue of the system, 5 ms each, or are closed for others.
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    // Those of before were closed for others that came.
    let mut byte = [0];
    let closed = std::io::Read::read(&mut held[0], &mut byte);
    assert!(!matches!(closed, Ok(1..)), "{closed:?}");
}
