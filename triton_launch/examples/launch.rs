// triton_launch/examples/launch.rs: a Triton kernel launched from Rust, through plait/triton_c.h.
//
// rustc --edition=2021 -O -L native=FOLDER -C link-arg=-Wl,-rpath,FOLDER launch.rs, where FOLDER has libplait_core.so:
// it is the parent of what `plait --cmake-dir` prints. Usage as launch.cpp's: launch KERNELS [PYTHON]
use std::ffi::{c_char, c_void, CStr, CString};
use std::ptr::{null, null_mut};

const POINTER: u8 = 1; // plait_triton_kind
const INTEGER: u8 = 2;
const FP32: u8 = 12; // plait_triton_dtype

#[repr(C)]
struct Argument {
    kind: u8,
    dtype: u8,
    constant: u8,
    varies: u8,
    reserved: [u8; 4],
    name: *const c_char,
    value: u64,
    n: u64,
}

#[repr(C)]
struct Config {
    size: u32,
    cooperative: u8,
    pdl: u8,
    reserved: u16,
    grid: [i64; 3],
    stream: *mut c_void,
    num_warps: i16,
    num_stages: i16,
    num_ctas: i16,
    maxnreg: i16,
    others: *const c_void,
    grid_of: *const c_void,
    user: *mut c_void,
}

#[repr(C)]
struct Error {
    message: *const c_char,
    kernel: *const c_char,
    specialization: *const c_char,
    traceback: *const c_char,
    argument: i32,
}

#[link(name = "plait_core")]
extern "C" {
    fn plait_triton_last_error() -> *const Error;
    fn plait_triton_jit(f: *const c_char, name: *const c_char, python: *const c_char, k: *mut *mut c_void) -> i32;
    fn plait_triton_from_pack(path: *const c_char, name: *const c_char, k: *mut *mut c_void) -> i32;
    fn plait_triton_launch(k: *mut c_void, config: *const Config, arguments: *const Argument, n: usize) -> i32;
    fn dlopen(file: *const c_char, flags: i32) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

fn check(status: i32) {
    if status != 0 {
        eprintln!("{}", unsafe { CStr::from_ptr((*plait_triton_last_error()).message) }.to_string_lossy());
        std::process::exit(1);
    }
}

fn argument(kind: u8, dtype: u8, value: u64) -> Argument {
    Argument { kind, dtype, constant: 0, varies: 0, reserved: [0; 4], name: null(), value, n: 0 }
}

/// The entry point of the CUDA driver with this name.
unsafe fn driver<F: Copy>(name: &CStr) -> F {
    let library = dlopen(c"libcuda.so.1".as_ptr(), 2);
    assert!(!library.is_null(), "no CUDA driver");
    let found = dlsym(library, name.as_ptr());
    assert!(!found.is_null(), "the driver has no {name:?}");
    std::mem::transmute_copy(&found)
}

unsafe fn copy_of(values: &[f32]) -> u64 {
    let allocate: extern "C" fn(*mut u64, usize) -> i32 = driver(c"cuMemAlloc_v2");
    let write: extern "C" fn(u64, *const f32, usize) -> i32 = driver(c"cuMemcpyHtoD_v2");
    let mut memory = 0;
    assert_eq!(allocate(&mut memory, size_of_val(values)), 0);
    assert_eq!(write(memory, values.as_ptr(), size_of_val(values)), 0);
    memory
}

fn main() {
    const N: usize = 100000;
    const BLOCK: usize = 1024;
    let given: Vec<String> = std::env::args().collect();
    let file = CString::new(given[1].as_str()).unwrap();
    let x: Vec<f32> = (0..N).map(|i| (i as f32).sin()).collect();
    let y: Vec<f32> = (0..N).map(|i| i as f32).collect();
    let mut out = vec![0f32; N];
    unsafe {
        let init: extern "C" fn(u32) -> i32 = driver(c"cuInit");
        let retain: extern "C" fn(*mut *mut c_void, i32) -> i32 = driver(c"cuDevicePrimaryCtxRetain");
        let set: extern "C" fn(*mut c_void) -> i32 = driver(c"cuCtxSetCurrent");
        let read: extern "C" fn(*mut f32, u64, usize) -> i32 = driver(c"cuMemcpyDtoH_v2");
        let mut context = null_mut();
        assert_eq!((init(0), retain(&mut context, 0), set(context)), (0, 0, 0));
        let out_gpu = copy_of(&out);

        let mut add = null_mut();
        if given[1].ends_with(".py") {
            let python = CString::new(given.get(2).map_or("python3", |p| p)).unwrap();
            check(plait_triton_jit(file.as_ptr(), c"add_kernel".as_ptr(), python.as_ptr(), &mut add));
        } else {
            check(plait_triton_from_pack(file.as_ptr(), c"add_kernel".as_ptr(), &mut add));
        }
        let arguments = [
            argument(POINTER, FP32, copy_of(&x)),
            argument(POINTER, FP32, copy_of(&y)),
            argument(POINTER, FP32, out_gpu),
            argument(INTEGER, 0, N as u64),
            argument(INTEGER, 0, BLOCK as u64),
        ];
        let config = Config {
            size: size_of::<Config>() as u32,
            cooperative: 0,
            pdl: 0,
            reserved: 0,
            grid: [N.div_ceil(BLOCK) as i64, 1, 1],
            stream: null_mut(),
            num_warps: 0,
            num_stages: 0,
            num_ctas: 0,
            maxnreg: 0,
            others: null(),
            grid_of: null(),
            user: null_mut(),
        };
        check(plait_triton_launch(add, &config, arguments.as_ptr(), arguments.len()));
        assert_eq!(read(out.as_mut_ptr(), out_gpu, size_of_val(&out[..])), 0);
    }
    let error = (0..N).map(|i| (x[i] + y[i] - out[i]).abs() / (1.0 + y[i])).fold(0.0, f32::max);
    println!("add: largest error {error:.1e}");
    assert!(error < 1e-6);
}
