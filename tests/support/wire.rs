//! A proxy between client and server that counts round trips and can lose an answer.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::TestDatabase;

/// A proxy on a local port. It lives as long as the process: the threads end with their connections.
pub struct Wire {
    url: String,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    round_trips: AtomicUsize,
    /// Which of the next answers is lost; none at zero.
    to_lose: AtomicUsize,
    lost: AtomicUsize,
    silent: AtomicBool,
    silent_after_loss: AtomicBool,
}

impl Wire {
    pub fn to(database: &TestDatabase) -> Self {
        let mut url = url::Url::parse(&database.url()).expect("a URL");
        let socket = url.query_pairs().find(|(name, _)| name == "host").map(|(_, folder)| folder.into_owned());
        let upstream = match socket {
            Some(folder) => Upstream::Unix(format!("{folder}/.s.PGSQL.5432")),
            None => Upstream::Tcp(url.host_str().expect("a host").to_owned(), url.port().unwrap_or(5432)),
        };
        let listener = TcpListener::bind("127.0.0.1:0").expect("a local port");
        url.set_host(Some("127.0.0.1")).expect("a URL with a host");
        url.set_port(Some(listener.local_addr().expect("an address").port())).expect("a URL with a port");
        // TLS would hide what is counted.
        url.set_query(Some("sslmode=disable"));
        let state = Arc::new(State::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                match &upstream {
                    Upstream::Unix(path) => join(client, UnixStream::connect(path).expect("the server"), &shared),
                    Upstream::Tcp(host, port) => {
                        join(client, TcpStream::connect((host.as_str(), *port)).expect("the server"), &shared);
                    }
                }
            }
        });
        Self { url: url.to_string(), state }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// How often the client has asked and waited for the server since the last look.
    pub fn round_trips(&self) -> usize {
        self.state.round_trips.swap(0, Ordering::SeqCst)
    }

    /// Lets the server carry out the next request, and cuts the connection in the place of its answer.
    pub fn lose_next_answer(&self) {
        self.lose_answer(1);
    }

    /// The same with the first, second, … of the next requests.
    pub fn lose_answer(&self, which: usize) {
        self.state.to_lose.store(which, Ordering::SeqCst);
    }

    /// From now on requests and new connections are accepted and never answered, or the other way round.
    pub fn silence(&self, silent: bool) {
        self.state.silent.store(silent, Ordering::SeqCst);
    }

    /// [`Wire::lose_next_answer`], and then [`Wire::silence`].
    pub fn lose_the_next_answer_and_fall_silent(&self) {
        self.state.silent_after_loss.store(true, Ordering::SeqCst);
        self.lose_next_answer();
    }

    /// How many answers were lost.
    pub fn lost(&self) -> usize {
        self.state.lost.load(Ordering::SeqCst)
    }
}

enum Upstream {
    Unix(String),
    Tcp(String, u16),
}

trait Stream: Read + Write + Send + Sized + 'static {
    fn twin(&self) -> Self;
    fn cut(&self);
}

impl Stream for TcpStream {
    fn twin(&self) -> Self {
        self.try_clone().expect("a second handle")
    }
    fn cut(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl Stream for UnixStream {
    fn twin(&self) -> Self {
        self.try_clone().expect("a second handle")
    }
    fn cut(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

fn join(client: TcpStream, server: impl Stream, state: &Arc<State>) {
    client.set_nodelay(true).expect("a local socket");
    let (mut from_client, mut to_server, counter) = (client.twin(), server.twin(), Arc::clone(state));
    thread::spawn(move || {
        let _ = forward_requests(&mut from_client, &mut to_server, &counter);
        to_server.cut();
    });
    let (mut from_server, mut to_client, state) = (server, client, Arc::clone(state));
    thread::spawn(move || {
        let _ = forward_answers(&mut from_server, &mut to_client, &state);
        to_client.cut();
        from_server.cut();
    });
}

/// Passes on whole messages. Sync and Query are the two that make a client wait for the server.
fn forward_requests(client: &mut impl Read, server: &mut impl Write, state: &State) -> std::io::Result<()> {
    let mut started = false;
    loop {
        let mut message = vec![0; if started { 5 } else { 4 }];
        client.read_exact(&mut message)?;
        let length = u32::from_be_bytes(message[message.len() - 4..].try_into().expect("four bytes"));
        let head = message.len();
        message.resize(head + length as usize - 4, 0);
        client.read_exact(&mut message[head..])?;
        if started && matches!(message[0], b'S' | b'Q') {
            state.round_trips.fetch_add(1, Ordering::SeqCst);
        }
        started = true;
        if state.silent.load(Ordering::SeqCst) {
            continue;
        }
        server.write_all(&message)?;
    }
}

fn forward_answers(server: &mut impl Read, client: &mut impl Write, state: &State) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = server.read(&mut buffer)?;
        if length == 0 {
            return Ok(());
        }
        let next = |which: usize| which.checked_sub(1);
        if state.to_lose.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) == Ok(1) {
            // The server answers when it is done, so what it was asked for has happened.
            state.silent.fetch_or(state.silent_after_loss.swap(false, Ordering::SeqCst), Ordering::SeqCst);
            state.lost.fetch_add(1, Ordering::SeqCst);
            return Ok(());
        }
        client.write_all(&buffer[..length])?;
    }
}
